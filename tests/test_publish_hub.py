"""What only the Hub can do wrong: commits lost, refused or overtaken, public repositories, cards, limits."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ckptflow.discovery.destinations import destination_of
from ckptflow.errors import PermanentPublishError, PublishError, TransientPublishError, UsageError
from ckptflow.formats.base import Location
from ckptflow.publish import MARKER_NAME, PublishRecord, upload
from hub_faults import COMMIT, FAST, always, once
from publishing import MIB, HubRepo, contents_of, outcomes, write_model
from servers.hub import TOKEN, Fault, HubRequest
from watched_uploads import Reader, kill_after, start_child


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
