"""What the Hub refuses, and what is refused before it is asked: rights, public repositories, cards."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from ckptflow.errors import PermanentPublishError, TransientPublishError
from ckptflow.publish import MARKER_NAME, PublishSettings, upload
from ckptflow.publish.hub_card import MADE_HERE, check_card
from hub_faults import COMMIT, FAST, always, content_requests
from publishing import HubRepo, contents_of, outcomes, write_model, write_record
from servers.hub import READ_TOKEN, TOKEN, Fault, HubRequest


class TestWhatWillNotHeal:
    @pytest.mark.parametrize(
        ("fault", "cure"),
        [
            (Fault(status=403, body='{"error": "Private repository storage limit reached"}'), "free storage"),
            (Fault(status=402, body='{"error": "Payment required"}'), "free storage"),
            (Fault(status=403, body='{"error": "Forbidden"}'), "right to write"),
            (Fault(status=401, body='{"error": "Invalid credentials"}'), "HF_TOKEN"),
            (Fault(status=400, body='{"error": "Bad file"}'), "Bad file"),
        ],
        ids=["storage", "payment", "rights", "token", "bad request"],
    )
    def test_a_commit_is_tried_once(self, store: HubRepo, tmp_path: Path, fault: Fault, cure: str) -> None:
        # https://github.com/huggingface/huggingface_hub/issues/3325
        fault = replace(fault, headers={"Content-Type": "application/json"})
        store.hub.interfere = always(COMMIT, fault)
        with pytest.raises(PermanentPublishError, match=cure):
            upload(write_model(tmp_path / "out"), store.uri, settings=FAST)
        assert len(store.hub.seen("POST", COMMIT)) == 1
        assert store.read_all() == {}

    def test_an_object_that_the_lfs_batch_refuses_is_tried_once(self, store: HubRepo, tmp_path: Path) -> None:
        body = (
            '{"objects": [{"oid": "' + "0" * 64 + '", "size": 1,'
            ' "error": {"code": 403, "message": "storage quota exceeded"}}]}'
        )
        store.hub.interfere = always("/objects/batch", Fault(status=200, body=body))
        with pytest.raises(PermanentPublishError, match="free storage"):
            upload(write_model(tmp_path / "out"), store.uri, settings=FAST)
        assert len(store.hub.seen("POST", "/objects/batch")) == 1

    @pytest.mark.parametrize("token", ["hf_nobodysToken", READ_TOKEN])
    def test_a_token_that_may_not_write_says_so_and_is_not_told(
        self, store: HubRepo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(PermanentPublishError, match=r"what to do: .*token") as caught:
            upload(write_model(tmp_path / "out"), store.uri, settings=FAST)
        assert token not in str(caught.value)
        assert content_requests(store) == []

    def test_no_token_says_so(self, store: HubRepo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HF_TOKEN")
        with pytest.raises(PermanentPublishError, match="HF_TOKEN"):
            upload(write_model(tmp_path / "out"), store.uri, settings=FAST)

    def test_a_token_that_a_server_repeats_is_not_passed_on(
        self, store: HubRepo, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, logger="ckptflow")
        store.hub.interfere = always(COMMIT, Fault(status=500, headers={"X-Error-Message": f"who is {TOKEN}"}))
        with pytest.raises(TransientPublishError, match=r"who is \*\*\*") as caught:
            upload(write_model(tmp_path / "out"), store.uri, settings=FAST)
        chain: list[BaseException] = [caught.value]
        while (cause := chain[-1].__cause__) is not None:
            chain.append(cause)
        assert TOKEN not in caplog.text + "".join(f"{each} {each!r}" for each in chain)


class TestVisibility:
    def test_a_new_repository_is_private(self, store: HubRepo, tmp_path: Path) -> None:
        upload(write_model(tmp_path / "out"), store.uri, settings=FAST)
        assert store.repo.private

    def test_a_public_one_is_made_when_asked_for(self, store: HubRepo, tmp_path: Path) -> None:
        upload(write_model(tmp_path / "out"), store.uri, settings=replace(FAST, visibility="public"))
        assert not store.repo.private

    def test_a_public_repository_is_refused_before_the_first_byte(self, store: HubRepo, tmp_path: Path) -> None:
        # https://github.com/unslothai/unsloth/issues/11229
        store.hub.create(store.repo_id, private=False)
        with pytest.raises(PermanentPublishError, match="--public"):
            upload(write_model(tmp_path / "out"), store.uri, settings=FAST)
        assert content_requests(store) == []

    def test_a_repository_made_public_during_the_upload_gets_no_commit(self, store: HubRepo, tmp_path: Path) -> None:
        def make_public(request: HubRequest) -> None:
            if request.method == "PUT":
                store.repo.private = False

        store.hub.interfere = make_public
        with pytest.raises(PermanentPublishError, match="is public"):
            upload(write_model(tmp_path / "out"), store.uri, settings=FAST)
        assert store.read_all() == {}


class TestCard:
    @pytest.mark.parametrize(
        ("settings", "cure"),
        [
            (replace(FAST, base_model_id="/mnt/ckpt/global_step_10"), "not a path"),
            (replace(FAST, base_model_id="../base"), "not a path"),
            (replace(FAST, license="mylicense"), "repositories-licenses"),
        ],
        ids=["path", "relative path", "license"],
    )
    def test_what_the_hub_would_refuse_fails_before_the_first_request(
        self, store: HubRepo, tmp_path: Path, settings: PublishSettings, cure: str
    ) -> None:
        # https://github.com/huggingface/huggingface_hub/issues/1934
        with pytest.raises(PermanentPublishError, match=cure):
            upload(write_model(tmp_path / "out"), store.uri, settings=settings)
        assert store.hub.seen("POST", "/api/") == []

    def test_what_only_the_hub_knows_to_be_wrong_fails_before_the_first_byte(
        self, store: HubRepo, tmp_path: Path
    ) -> None:
        settings = replace(FAST, license="gemma")  # not among the few that the double knows
        with pytest.raises(PermanentPublishError, match="license"):
            upload(write_model(tmp_path / "out"), store.uri, settings=settings)
        assert content_requests(store) == []
        assert store.hub.repos == {}

    @pytest.mark.parametrize(
        "front_matter",
        ["base_model: /mnt/ckpt/global_step_10", "license: mylicense", "base_model: [org/a, ./b]", "tags: ["],
    )
    def test_a_card_of_the_model_is_checked_too(self, store: HubRepo, tmp_path: Path, front_matter: str) -> None:
        model = write_model(tmp_path / "out")
        (model / "README.md").write_text(f"---\n{front_matter}\n---\n# Model\n")
        write_record(model, [n for n in contents_of(model) if n != MARKER_NAME], fingerprint="f")
        with pytest.raises(PermanentPublishError, match=r"README\.md"):
            upload(model, store.uri, settings=FAST)
        assert store.hub.seen("POST", "/api/") == []

    def test_a_card_of_the_model_is_published_as_it_is(self, store: HubRepo, tmp_path: Path) -> None:
        model = write_model(tmp_path / "out")
        (model / "README.md").write_text("---\nlicense: mit\n---\n# Model\n")
        write_record(model, [n for n in contents_of(model) if n != MARKER_NAME], fingerprint="f")
        record = upload(model, store.uri, settings=FAST)
        assert "README.md" in outcomes(record)
        assert store.repo.read_all()["README.md"] == (model / "README.md").read_bytes()

    def test_a_card_is_made_that_names_base_model_license_and_step(self, store: HubRepo, tmp_path: Path) -> None:
        model = write_model(tmp_path / "out")
        marker = (model / MARKER_NAME).read_text()
        source = '"source": {"name": "run|1/global_step_10", "layout": "fsdp", "global_step": 10}, "format"'
        (model / MARKER_NAME).write_text(marker.replace('"format"', source))
        settings = replace(FAST, license="apache-2.0", base_model_id="org/base")
        upload(model, store.uri, settings=settings)
        card = store.repo.read_all()["README.md"].decode()
        check_card(card.encode(), "card")
        assert "license: apache-2.0\nbase_model: org/base\n" in card
        for row in ("| Global step | 10 |", r"| Checkpoint | run\|1/global_step_10 |", "fingerprint-0"):
            assert row in card
        assert store.repo.branches["main"].title == "Publish the model of step 10"

    @pytest.mark.parametrize("is_ours", [False, True])
    def test_a_persons_card_is_left_and_an_earlier_one_of_ours_is_not(
        self, store: HubRepo, tmp_path: Path, is_ours: bool
    ) -> None:
        text = b"# Card\n" + (MADE_HERE.encode() if is_ours else b"")
        store.put("README.md", text)
        upload(write_model(tmp_path / "out"), store.uri, settings=FAST)
        assert (store.repo.read_all()["README.md"] == text) != is_ours
