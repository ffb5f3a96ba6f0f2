"""What each kind of destination must hold; seen from outside, on real stores."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptflow.errors import CkptflowError, OutputError, PermanentPublishError, PublishError, VerificationError
from ckptflow.publish import MARKER_NAME, PublishRecord, PublishSettings, read_local_model, upload
from ckptflow.publish.model import publish_rank
from publishing import FAST, MIB, Bucket, Directory, HubRepo, Store, contents_of, outcomes, write_model, write_record
from servers.hub import running_hub
from servers.proxy import running_proxy
from servers.seaweed import S3Server
from watched_uploads import Reader, kill_after, start_child

LARGE = (20 * MIB, 17 * MIB + 3, 5 * MIB)


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.service), "hf", "hf@branch"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    if request.param == "file":
        yield Directory(tmp_path / "a place" / "with # and ? and %")
        return
    if request.param in ("hf", "hf@branch"):
        with running_hub(tmp_path / "hub") as hub:
            for name, value in hub.environment().items():
                monkeypatch.setenv(name, value)
            if request.param == "hf@branch":
                # A new branch begins empty, whatever main holds.
                hub.create("tester/model", private=True).put("pytorch_model.bin", b"of main")
                hub.repos["tester/model"].order.clear()
            yield HubRepo(hub=hub, branch="main" if request.param == "hf" else "run-1/step-10")
        return
    server: S3Server = request.getfixturevalue("s3_server")
    with running_proxy(server.endpoint_url) as proxy:
        for name, value in server.environment(proxy.endpoint_url).items():
            monkeypatch.setenv(name, value)
        client = server.client()
        uri = f"s3://{request.getfixturevalue('s3_bucket_name')}/a place/{random.randbytes(6).hex()}"
        yield Bucket(uri=uri, client=client, proxy=proxy)
        client.close()


class TestEachDestination:
    def test_a_model_arrives_whole_in_order_and_is_proven(self, store: Store, tmp_path: Path) -> None:
        model = write_model(tmp_path / "out", weight_bytes=LARGE)
        done: list[int] = []
        record = upload(model, store.uri, settings=FAST, progress=done.append)
        assert store.read_all() == contents_of(model)
        arrived = store.names_by_arrival()
        # Small files of one rank go several at once.
        assert arrived[-1] == MARKER_NAME
        assert sorted(arrived[:-1], key=publish_rank) == arrived[:-1]
        assert sorted(arrived) == sorted(file.name for file in record.files)
        assert record.files[-1].name == MARKER_NAME
        assert record.files[-2].name == "model.safetensors.index.json"
        assert (record.state, record.already_published, record.uri) == ("published", False, store.uri)
        assert all(file.verified_by for file in record.files)
        assert sum(done) == read_local_model(model).total_bytes == record.total_bytes == record.sent_bytes
        assert store.leftovers() == []

    def test_a_second_upload_changes_nothing(self, store: Store, tmp_path: Path) -> None:
        model = write_model(tmp_path / "out")
        upload(model, store.uri, settings=FAST)
        arrivals = store.names_by_arrival()
        done: list[int] = []
        again = upload(model, store.uri, settings=FAST, progress=done.append)
        assert again.already_published
        assert set(outcomes(again).values()) == {"skipped"}
        assert sum(done) == again.total_bytes
        assert store.names_by_arrival() == arrivals

    @pytest.mark.parametrize("verify", ["full", "size"])
    def test_the_proof_can_be_chosen(self, store: Store, tmp_path: Path, verify: str) -> None:
        settings = PublishSettings(verify=verify)  # type: ignore[arg-type]
        record = upload(write_model(tmp_path / "out"), store.uri, settings=settings)
        expected = "sha256" if verify == "full" else "size"
        assert all(expected in file.verified_by for file in record.files[:-1])

    def test_files_of_an_interrupted_upload_are_kept(self, store: Store, tmp_path: Path) -> None:
        model = write_model(tmp_path / "out")
        name = "model-00001-of-00002.safetensors"
        store.put(name, (model / name).read_bytes())
        record = upload(model, store.uri, settings=FAST)
        assert [n for n, outcome in outcomes(record).items() if outcome == "skipped"] == [name]
        assert store.read_all() == contents_of(model)

    def test_another_model_is_refused_and_left(self, store: Store, tmp_path: Path) -> None:
        first, second = write_model(tmp_path / "first"), write_model(tmp_path / "second", seed=1)
        upload(first, store.uri, settings=FAST)
        with pytest.raises(PermanentPublishError, match="holds another model") as caught:
            upload(second, store.uri, settings=FAST)
        assert "fingerprint-0" in str(caught.value)
        assert store.read_all() == contents_of(first)

    def test_another_model_is_replaced_when_told_and_none_of_it_stays(self, store: Store, tmp_path: Path) -> None:
        first = write_model(tmp_path / "first", weight_bytes=(5, 6, 7))
        second = write_model(tmp_path / "second", seed=1)
        upload(first, store.uri, settings=FAST)
        store.put("notes.md", b"a person's")
        store.put("pytorch_model.bin", b"would be loaded by mistake")
        upload(second, store.uri, settings=FAST, overwrite=True)
        assert store.read_all() == {**contents_of(second), "notes.md": b"a person's"}

    @pytest.mark.parametrize(
        "name",
        [
            "model_world_size_2_rank_0.pt",
            "mp_rank_00_model_states.pt",
            "trainer_state.json",
            "optimizer.pt",
            "__0_0.distcp",
            "last.ckpt",
        ],
    )
    def test_a_checkpoint_is_not_overwritten_though_asked(self, store: Store, tmp_path: Path, name: str) -> None:
        there = {name: b"of a training", "model-00001-of-00002.safetensors": b"the fp32 weights"}
        for each, content in there.items():
            store.put(each, content)
        model = write_model(tmp_path / "out")
        for overwrite in (False, True):
            with pytest.raises(PermanentPublishError, match="checkpoint of a trainer"):
                upload(model, store.uri, settings=FAST, overwrite=overwrite)
        assert store.read_all() == there
        assert store.leftovers() == []

    def test_an_overwrite_leaves_what_no_loader_takes(self, store: Store, tmp_path: Path) -> None:
        store.put("state.pt", b"a person's")
        model = write_model(tmp_path / "out")
        upload(model, store.uri, settings=FAST, overwrite=True)
        assert store.read_all() == {**contents_of(model), "state.pt": b"a person's"}

    @pytest.mark.parametrize("name", ["model-00003-of-00003.safetensors", "config.json", "step-9/ckptflow.json"])
    def test_foreign_files_without_a_record_are_refused_and_left(self, store: Store, tmp_path: Path, name: str) -> None:
        store.put(name, b"somebody's")
        with pytest.raises(PermanentPublishError, match="not of this model") as caught:
            upload(write_model(tmp_path / "out"), store.uri, settings=FAST)
        assert name in str(caught.value)
        assert store.read_all() == {name: b"somebody's"}

    def test_a_record_that_does_not_parse_is_refused(self, store: Store, tmp_path: Path) -> None:
        store.put(MARKER_NAME, b"{")
        with pytest.raises(PermanentPublishError, match="does not parse"):
            upload(write_model(tmp_path / "out"), store.uri, settings=FAST)

    @pytest.mark.parametrize("damage", ["gone", "other bytes"])
    def test_a_published_model_that_was_damaged_is_healed(self, store: Store, tmp_path: Path, damage: str) -> None:
        model = write_model(tmp_path / "out")
        upload(model, store.uri, settings=FAST)
        name = "model-00002-of-00002.safetensors"
        store.delete(name)
        if damage == "other bytes":
            store.put(name, bytes((model / name).stat().st_size))
        record = upload(model, store.uri, settings=FAST)
        sent = [n for n, outcome in outcomes(record).items() if outcome == "sent"]
        assert sent == ([MARKER_NAME] if store.has_commits else [name, MARKER_NAME])
        assert store.read_all() == contents_of(model)

    @pytest.mark.parametrize("size", [300_000, 17 * MIB])
    def test_a_local_file_that_is_not_as_recorded_stops_the_upload(
        self, store: Store, tmp_path: Path, size: int
    ) -> None:
        model = write_model(tmp_path / "out", weight_bytes=(1000, size))
        name = "model-00002-of-00002.safetensors"
        with open(model / name, "r+b") as file:
            file.seek(size // 2)
            file.write(b"tampered")
        with pytest.raises(VerificationError, match="sha256"):
            upload(model, store.uri, settings=FAST)
        assert set(store.read_all()) == (set() if store.has_commits else {"model-00001-of-00002.safetensors"})
        assert store.leftovers() == []

    def test_a_local_file_that_changed_after_it_was_published_is_found(self, store: Store, tmp_path: Path) -> None:
        model = write_model(tmp_path / "out")
        upload(model, store.uri, settings=FAST)
        (model / "config.json").write_bytes(b"x" * (model / "config.json").stat().st_size)
        with pytest.raises(VerificationError, match=r"config\.json"):
            upload(model, store.uri, settings=FAST)

    def test_a_kill_costs_at_most_the_file_in_flight(self, store: Store, tmp_path: Path) -> None:
        model = write_model(tmp_path / "out", weight_bytes=LARGE)
        moments = random.Random(7)
        kept: dict[str, str] = {}
        with Reader(store, model) as reader:
            for _ in range(4):
                kill_after(start_child(model, store.uri), moments.randrange(sum(LARGE)))
                assert set(kept) <= set(store.sizes())
                kept = dict.fromkeys(store.sizes(), "skipped")
            record = upload(model, store.uri, settings=FAST)
        assert store.read_all() == contents_of(model)
        assert kept.items() <= outcomes(record).items()
        assert store.leftovers() == []
        assert reader.looks > 10
        assert reader.faults == []
        if isinstance(store, Bucket):
            made = [r for r in store.proxy.requests if r.method == "POST" and "uploadId" in r.query]
            assert len(made) == len({r.key for r in made})

    def test_an_overwrite_that_was_killed_is_finished_without_traces(self, store: Store, tmp_path: Path) -> None:
        first = write_model(tmp_path / "first", weight_bytes=(5, 6, 7, 8))
        second = write_model(tmp_path / "second", weight_bytes=LARGE, seed=1)
        (first / "old-notes.txt").write_bytes(b"part of the first model")
        write_record(first, [n for n in contents_of(first) if n != MARKER_NAME], fingerprint="first")
        upload(first, store.uri, settings=FAST)
        kill_after(start_child(second, store.uri, "overwrite"), 10 * MIB)
        if store.has_commits:
            assert store.read_all() == contents_of(first)
        else:
            assert MARKER_NAME not in store.sizes()
        upload(second, store.uri, settings=FAST, overwrite=True)
        assert store.read_all() == contents_of(second)

    def test_two_uploads_of_one_model_at_once_both_end_well(self, store: Store, tmp_path: Path) -> None:
        model = write_model(tmp_path / "out", weight_bytes=LARGE)
        copy = shutil.copytree(model, tmp_path / "copy")
        with Reader(store, model) as reader, ThreadPoolExecutor(2) as pool:
            records = list(pool.map(lambda out: upload(out, store.uri, settings=FAST), (model, copy)))
        assert store.read_all() == contents_of(model)
        assert sorted(outcomes(record)[MARKER_NAME] for record in records) == ["sent", "skipped"]
        assert store.leftovers() == []
        assert reader.faults == []

    def test_two_models_at_once_are_never_mixed(self, store: Store, tmp_path: Path) -> None:
        models = [write_model(tmp_path / str(seed), weight_bytes=(9 * MIB, 5), seed=seed) for seed in range(2)]

        def result(model: Path) -> PublishRecord | PublishError:
            try:
                return upload(model, store.uri, settings=FAST)
            except PublishError as error:
                return error

        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(result, models))
        winners = [m for m, r in zip(models, results, strict=True) if isinstance(r, PublishRecord)]
        assert len(winners) <= 1
        assert (MARKER_NAME in store.read_all()) == bool(winners)
        for model in winners:
            assert store.read_all() == contents_of(model)

    def test_a_directory_without_a_record_is_no_model(self, store: Store, tmp_path: Path) -> None:
        with pytest.raises(OutputError, match="ckptflow convert"):
            upload(tmp_path / "nothing", store.uri)

    def test_an_index_that_names_missing_files_is_refused(self, store: Store, tmp_path: Path) -> None:
        model = write_model(tmp_path / "out")
        names = [n for n in contents_of(model) if n not in (MARKER_NAME, "model-00002-of-00002.safetensors")]
        write_record(model, names, fingerprint="f")
        with pytest.raises(VerificationError, match="model-00002-of-00002"):
            upload(model, store.uri)
        assert store.read_all() == {}

    def test_a_link_that_leaves_the_directory_is_refused(self, store: Store, tmp_path: Path) -> None:
        model = write_model(tmp_path / "out")
        shutil.move(model / "config.json", tmp_path / "elsewhere.json")
        (model / "config.json").symlink_to(tmp_path / "elsewhere.json")
        with pytest.raises(CkptflowError, match="plain file inside"):
            upload(model, store.uri)
        assert store.read_all() == {}
