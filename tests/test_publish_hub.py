"""What only the Hub can do wrong: commits lost, refused or overtaken, public repositories, cards, limits."""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ckptflow.destinations import destination_of
from ckptflow.errors import PermanentPublishError, PublishError, TransientPublishError, UsageError
from ckptflow.formats.base import Location
from ckptflow.publish import MARKER_NAME, PublishRecord, PublishSettings, upload
from ckptflow.publish.hub_card import MADE_HERE, check_card
from publishing import MIB, HubRepo, contents_of, outcomes, write_model, write_record
from servers.hub import READ_TOKEN, TOKEN, Fault, HubRequest, running_hub
from watched_uploads import Reader, kill_after, start_child

FAST = PublishSettings(max_attempts=4, backoff_seconds=0.01, backoff_limit_seconds=0.05)
COMMIT = r"/commit/"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubRepo]:
    with running_hub(tmp_path / "hub") as hub:
        for name, value in hub.environment().items():
            monkeypatch.setenv(name, value)
        yield HubRepo(hub=hub)


def once(pattern: str, *faults: Fault, method: str = "POST") -> object:
    """An interference: the first requests of a kind meet these faults, later ones none."""
    left = list(faults)

    def interfere(request: HubRequest) -> Fault | None:
        is_meant = request.method == method and re.search(pattern, request.path) is not None
        return left.pop(0) if is_meant and left else None

    return interfere


def always(pattern: str, fault: Fault, method: str = "POST") -> object:
    return lambda request: fault if request.method == method and re.search(pattern, request.path) else None


def content_requests(store: HubRepo) -> list[HubRequest]:
    return [*store.hub.seen("PUT", "/lfs/"), *store.hub.seen("POST", COMMIT)]


class TestCommit:
    def test_a_model_is_one_commit_on_top_of_the_head(self, store: HubRepo, tmp_path: Path) -> None:
        model = write_model(tmp_path / "out", weight_bytes=(9 * MIB, 5))
        record = upload(model, store.uri, settings=FAST)
        first, second = store.repo.branches["main"].history()
        assert (record.revision, second.title) == (first.oid, "initial commit")
        assert store.read_all() == contents_of(model)
        assert len(store.hub.seen("POST", COMMIT)) == 1

    @pytest.mark.parametrize(
        "fault",
        [
            Fault(status=429, headers={"Retry-After": "0"}),
            Fault(status=503, body="<html><body>Service Unavailable</body></html>"),
            Fault(status=500),
            Fault(drop="before"),
            Fault(drop="half"),
        ],
        ids=lambda fault: fault.drop or str(fault.status),
    )
    def test_what_heals_is_tried_again(self, store: HubRepo, tmp_path: Path, fault: Fault) -> None:
        # https://github.com/huggingface/huggingface_hub/issues/3071
        model = write_model(tmp_path / "out")
        store.hub.interfere = once(COMMIT, fault, fault)
        upload(model, store.uri, settings=FAST)
        assert store.read_all() == contents_of(model)
        assert len(store.hub.seen("POST", COMMIT)) == 3
        assert set(store.repo.stored.values()) == {1}

    @pytest.mark.parametrize(
        "headers", [{"RateLimit": '"api";r=0;t=1'}, {"Retry-After": "1"}], ids=lambda headers: next(iter(headers))
    )
    def test_a_rate_limit_waits_as_long_as_the_hub_says(
        self, store: HubRepo, tmp_path: Path, headers: dict[str, str]
    ) -> None:
        store.hub.interfere = once(COMMIT, Fault(status=429, headers=headers))
        settings = replace(FAST, backoff_limit_seconds=0.1)
        started = time.monotonic()
        upload(write_model(tmp_path / "out"), store.uri, settings=settings)
        assert time.monotonic() - started > 1.0

    def test_a_commit_whose_answer_was_lost_is_found_again(self, store: HubRepo, tmp_path: Path) -> None:
        store.hub.interfere = once(COMMIT, Fault(drop="after"))
        model = write_model(tmp_path / "out")
        record = upload(model, store.uri, settings=FAST)
        assert len(store.repo.branches["main"].history()) == 2
        assert (record.revision, outcomes(record)[MARKER_NAME]) == (store.repo.branches["main"].oid, "sent")

    def test_a_lost_commit_is_found_below_a_later_one(self, store: HubRepo, tmp_path: Path) -> None:
        lost: list[HubRequest] = []

        def lose(request: HubRequest) -> Fault | None:
            if not lost and re.search(COMMIT, request.path):
                lost.append(request)
                return Fault(drop="after")
            if lost and len(store.repo.branches["main"].history()) == 2:
                store.put("notes.md", b"a person's")
            return None

        store.hub.interfere = lose
        record = upload(write_model(tmp_path / "out"), store.uri, settings=FAST)
        assert [c.title for c in store.repo.branches["main"].history()][:2] == ["put notes.md", "Publish a model"]
        assert record.revision == store.repo.branches["main"].history()[1].oid

    def test_a_lost_commit_that_healed_a_model_is_found_though_the_marker_is_the_old_one(
        self, store: HubRepo, tmp_path: Path
    ) -> None:
        model = write_model(tmp_path / "out")
        upload(model, store.uri, settings=FAST)
        store.delete("config.json")
        store.hub.interfere = once(COMMIT, Fault(drop="after"))
        upload(model, store.uri, settings=FAST)
        assert store.read_all() == contents_of(model)

    def test_a_commit_that_hangs_ends(self, store: HubRepo, tmp_path: Path) -> None:
        store.hub.interfere = once(COMMIT, Fault(delay_seconds=3.0, drop="before"))
        started = time.monotonic()
        model = write_model(tmp_path / "out")
        upload(model, store.uri, settings=replace(FAST, read_timeout_seconds=0.2))
        assert time.monotonic() - started < 3.0
        assert store.read_all() == contents_of(model)

    def test_a_commit_of_somebody_else_that_changes_no_file_of_ours_is_gone_along_with(
        self, store: HubRepo, tmp_path: Path
    ) -> None:
        meddled: list[str] = []

        def meddle(request: HubRequest) -> None:
            if re.search(COMMIT, request.path) and not meddled:
                meddled.append(request.path)
                store.put("README.md", b"# a person's")

        store.hub.interfere = meddle
        model = write_model(tmp_path / "out")
        upload(model, store.uri, settings=FAST)
        assert store.read_all() == contents_of(model)
        assert store.repo.read_all()["README.md"] == b"# a person's"

    def test_a_commit_of_somebody_else_that_changes_files_stops_it(self, store: HubRepo, tmp_path: Path) -> None:
        meddled: list[str] = []

        def meddle(request: HubRequest) -> None:
            if re.search(COMMIT, request.path) and not meddled:
                meddled.append(request.path)
                store.put("pytorch_model.bin", b"would be loaded")

        store.hub.interfere = meddle
        with pytest.raises(TransientPublishError, match="changed during the upload"):
            upload(write_model(tmp_path / "out"), store.uri, settings=FAST)
        assert set(store.read_all()) == {"pytorch_model.bin"}

    def test_two_models_at_once_end_with_one_winner_and_the_other_says_so(self, store: HubRepo, tmp_path: Path) -> None:
        models = [write_model(tmp_path / str(seed), seed=seed) for seed in range(2)]

        def result(model: Path) -> PublishRecord | PublishError:
            try:
                return upload(model, store.uri, settings=FAST)
            except PublishError as error:
                return error

        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(result, models))
        winner = next(m for m, r in zip(models, results, strict=True) if isinstance(r, PublishRecord))
        loser = next(r for r in results if not isinstance(r, PublishRecord))
        assert "another" in str(loser)
        assert store.read_all() == contents_of(winner)

    @pytest.mark.parametrize("wanted", ["config.json", "model-00001-of-00002.safetensors"])
    def test_a_commit_that_lost_a_file_is_withdrawn(self, store: HubRepo, tmp_path: Path, wanted: str) -> None:
        def lose(request: HubRequest) -> None:
            if request.method == "GET" and "/tree/" in request.path and MARKER_NAME in store.sizes():
                head = store.repo.branches["main"]
                files = {name: entry for name, entry in head.files.items() if name != wanted}
                store.repo.branches["main"] = replace(head, files=files)

        store.hub.interfere = lose
        with pytest.raises(TransientPublishError, match=re.escape(wanted)):
            upload(write_model(tmp_path / "out"), store.uri, settings=FAST)
        assert MARKER_NAME not in store.sizes()


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


class TestRevisions:
    def test_a_tag_is_put_on_the_commit_last(self, store: HubRepo, tmp_path: Path) -> None:
        model = write_model(tmp_path / "out")
        record = upload(model, f"{store.uri}@tag:step-10", settings=FAST)
        assert store.repo.tags["step-10"].oid == store.repo.branches["main"].oid == record.revision
        assert upload(model, f"{store.uri}@tag:step-10", settings=FAST).already_published

    def test_a_tag_that_a_killed_run_did_not_put_is_put(self, store: HubRepo, tmp_path: Path) -> None:
        model = write_model(tmp_path / "out")
        upload(model, store.uri, settings=FAST)
        record = upload(model, f"{store.uri}@tag:step-10", settings=FAST)
        assert store.repo.tags["step-10"].oid == record.revision
        assert len(store.repo.branches["main"].history()) == 2

    def test_tags_stay_while_the_branch_moves_on_and_are_never_moved(self, store: HubRepo, tmp_path: Path) -> None:
        first, second = write_model(tmp_path / "first"), write_model(tmp_path / "second", seed=1)
        upload(first, f"{store.uri}@tag:step-10", settings=FAST)
        upload(second, f"{store.uri}@tag:step-20", settings=FAST, overwrite=True)
        assert store.read_all() == contents_of(second)
        tagged = store.repo.read_all("step-10")
        assert contents_of(first).items() <= tagged.items()
        with pytest.raises(PermanentPublishError, match="tags don't move"):
            upload(second, f"{store.uri}@tag:step-10", settings=FAST, overwrite=True)

    @pytest.mark.parametrize(
        "uri", ["hf://name", "hf://org/name/run/step-10", "hf://org/name@", "hf://org/name@a b", "hf://org/name@../x"]
    )
    def test_what_names_no_repository_is_refused(self, store: HubRepo, tmp_path: Path, uri: str) -> None:
        with pytest.raises(UsageError, match="hf://ORG/NAME"):
            upload(write_model(tmp_path / "out"), uri, settings=FAST)

    @pytest.mark.parametrize(
        ("uri", "expected"),
        [
            ("hf://org/name", "hf://org/name@my-run/step-10"),
            ("hf://org/{run}", "hf://org/my-run@step-10"),
            ("hf://org/{run}-{step}", "hf://org/my-run-step-10"),
            ("hf://org/name@tag:{step}", "hf://org/name@tag:step-10"),
            ("hf://org/name@main", "hf://org/name@main"),
        ],
    )
    def test_a_repository_gets_a_branch_for_each_step_unless_told(
        self, tmp_path: Path, uri: str, expected: str
    ) -> None:
        location = Location(path=tmp_path / "my-run" / "global_step_10", root=tmp_path, layout="x", global_step=10)
        assert destination_of(location, uri) == expected


class TestTransfer:
    @pytest.mark.parametrize("seed", range(3))
    def test_dropped_connections_do_not_start_all_over(self, store: HubRepo, tmp_path: Path, seed: int) -> None:
        # https://github.com/huggingface/huggingface_hub/issues/3747
        model = write_model(tmp_path / "out", weight_bytes=(9 * MIB,) * 2 + (MIB,) * 3)
        unlucky = random.Random(seed).randrange(1, 6)
        store.hub.interfere = once(r"/lfs/", *[Fault()] * unlucky, Fault(drop="half"), method="PUT")
        upload(model, store.uri, settings=FAST)
        assert store.read_all() == contents_of(model)
        assert set(store.repo.stored.values()) == {1}

    @pytest.mark.parametrize(
        "fault",
        [
            Fault(status=429, headers={"Retry-After": "0"}),
            Fault(status=503, body="<Error><Code>SlowDown</Code></Error>"),
            Fault(status=400, body="<Error><Code>BadDigest</Code></Error>"),
            Fault(status=400, body="<Error><Code>RequestTimeout</Code></Error>"),
        ],
        ids=["429", "SlowDown", "BadDigest", "RequestTimeout"],
    )
    def test_what_heals_in_the_storage_behind_the_hub_is_tried_again(
        self, store: HubRepo, tmp_path: Path, fault: Fault
    ) -> None:
        store.hub.interfere = once("/lfs/", fault, method="PUT")
        model = write_model(tmp_path / "out")
        upload(model, store.uri, settings=FAST)
        assert store.read_all() == contents_of(model)
        assert set(store.repo.stored.values()) == {1}

    def test_a_body_that_the_storage_refuses_is_tried_once(self, store: HubRepo, tmp_path: Path) -> None:
        fault = Fault(status=400, body="<Error><Code>InvalidRequest</Code></Error>")
        store.hub.interfere = always("/lfs/", fault, method="PUT")
        with pytest.raises(PermanentPublishError):
            upload(write_model(tmp_path / "out"), store.uri, settings=FAST)
        assert len(store.hub.seen("PUT", "/lfs/")) == 1

    def test_a_signed_url_that_ran_out_is_asked_for_anew(self, store: HubRepo, tmp_path: Path) -> None:
        store.hub.interfere = once("/lfs/", Fault(status=403, body="Request has expired"), method="PUT")
        model = write_model(tmp_path / "out")
        upload(model, store.uri, settings=FAST)
        assert store.read_all() == contents_of(model)

    def test_kills_cost_the_file_in_flight_and_no_reader_sees_half_a_model(
        self, store: HubRepo, tmp_path: Path
    ) -> None:
        sizes = (6 * MIB, 6 * MIB, 20 * MIB, 5 * MIB)
        model = write_model(tmp_path / "out", weight_bytes=sizes)
        moments = random.Random(3)
        with Reader(store, model) as reader:
            for _ in range(5):
                kill_after(start_child(model, store.uri), moments.randrange(sum(sizes)))
            upload(model, store.uri, settings=FAST)
        assert store.read_all() == contents_of(model)
        assert set(store.repo.stored.values()) == {1}
        assert len(store.repo.branches["main"].history()) == 2
        assert (reader.faults, store.leftovers()) == ([], [])
        assert reader.looks > 10

    def test_a_long_listing_comes_in_pages(self, store: HubRepo, tmp_path: Path) -> None:
        store.hub.page_size = 2
        model = write_model(tmp_path / "out")
        upload(model, store.uri, settings=FAST)
        assert upload(model, store.uri, settings=FAST).already_published


@pytest.mark.skipif(shutil.which("git-lfs") is None, reason="git-lfs is not installed")
def test_the_double_speaks_lfs_as_git_lfs_does(store: HubRepo, tmp_path: Path) -> None:
    store.hub.create(store.repo_id, private=True)
    work, content = tmp_path / "work", random.Random(5).randbytes(100_000)
    url = f"{store.hub.endpoint}/{store.repo_id}.git/info/lfs".replace("http://", f"http://u:{TOKEN}@")
    environment = {**os.environ, "HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0"}

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=work, env=environment, check=True, capture_output=True, text=True).stdout

    work.mkdir()
    git("init", "-q")
    git("config", "lfs.url", url)
    git("remote", "add", "origin", f"{store.hub.endpoint}/{store.repo_id}")
    pointer = subprocess.run(
        ["git", "lfs", "clean"], input=content, cwd=work, env=environment, check=True, capture_output=True
    ).stdout.decode()
    oid = re.search(r"sha256:([0-9a-f]{64})", pointer)
    assert oid is not None
    git("lfs", "push", "--object-id", "origin", oid[1])
    assert store.repo.lfs_path(oid[1]).read_bytes() == content
    shutil.rmtree(work / ".git" / "lfs" / "objects")
    back = subprocess.run(
        ["git", "lfs", "smudge"], input=pointer.encode(), cwd=work, env=environment, check=True, capture_output=True
    )
    assert back.stdout == content
