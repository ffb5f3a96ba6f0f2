"""What an upload would refuse at its end is refused before the work: the same words, and nothing left there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints import write_fsdp_step
from ckptflow.conversion import Conversion, plan_conversion
from ckptflow.convert import convert
from ckptflow.errors import DestinationTakenError, PermanentPublishError, PublishError
from ckptflow.publish import MARKER_NAME, Destination, PublishSettings, upload
from ckptflow.publish.before import check_before_work
from ckptflow.request import ConvertRequest
from publishing import FAST, Bucket, Directory, HubRepo, Store, contents_of
from servers.hub import READ_TOKEN, running_hub
from servers.proxy import Answer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fsdp_step(tmp_path_factory.mktemp("before") / "run")


def request_for(checkpoint: Path, out: Path, dtype: str = "bfloat16") -> ConvertRequest:
    return ConvertRequest(path=checkpoint, out=out, dtype=dtype, max_shard_bytes=20_000)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def planned(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    return plan_conversion(request_for(checkpoint, tmp_path_factory.mktemp("planned") / "out"))


@pytest.fixture(scope="module")
def model(planned: Conversion) -> Path:
    """What becomes of the plan."""
    convert(planned.request)
    return planned.request.out


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.service), "hf"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    if request.param == "file":
        yield Directory(tmp_path / "models" / "step-10")
    elif request.param == "s3":
        yield request.getfixturevalue("bucket")
    else:
        with running_hub(tmp_path / "hub") as hub:
            for name, value in hub.environment().items():
                monkeypatch.setenv(name, value)
            yield HubRepo(hub=hub)


def told_early(planned: Conversion, uri: str, *, overwrite: bool = False, settings: PublishSettings = FAST) -> str:
    """What is said before the work; nothing where there is nothing to say."""
    try:
        check_before_work(planned, Destination(uri=uri, settings=settings, overwrite=overwrite))
    except PublishError as error:
        return str(error)
    return ""


def told_at_the_end(model: Path, uri: str, *, overwrite: bool = False) -> str:
    with pytest.raises(DestinationTakenError) as caught:
        upload(model, uri, settings=FAST, overwrite=overwrite)
    return str(caught.value)


def test_an_empty_place_is_left_empty(planned: Conversion, place: Store) -> None:
    assert told_early(planned, place.uri) == ""
    assert place.read_all() == {}
    if isinstance(place, HubRepo):
        assert place.hub.repos == {}, "no repository is made for a model that is not there yet"
    else:
        assert place.leftovers() == []
    if isinstance(place, Directory):
        assert not place.path.parent.exists()


def test_another_model_is_told_in_the_words_of_the_upload(
    planned: Conversion, model: Path, checkpoint: Path, place: Store, tmp_path: Path
) -> None:
    convert(request_for(checkpoint, tmp_path / "other", "float16"))
    upload(tmp_path / "other", place.uri, settings=FAST)
    told = told_early(planned, place.uri)
    assert told == told_at_the_end(model, place.uri)
    assert "the destination holds another model" in told
    assert "found: that of run/global_step_10/actor, fingerprint" in told
    assert told_early(planned, place.uri, overwrite=True) == ""
    assert place.read_all() == contents_of(tmp_path / "other")


@pytest.mark.parametrize("name", ["notes.md", "model.safetensors", "config.json", "model_world_size_2_rank_0.pt"])
def test_files_of_somebody_else_are_told_in_the_words_of_the_upload(
    planned: Conversion, model: Path, place: Store, name: str
) -> None:
    place.put(name, b"somebody's")
    told = told_early(planned, place.uri)
    assert told == told_at_the_end(model, place.uri)
    assert name in told
    is_checkpoint = name.endswith(".pt")
    assert told_early(planned, place.uri, overwrite=True) == (
        told_at_the_end(model, place.uri, overwrite=True) if is_checkpoint else ""
    )
    assert place.read_all() == {name: b"somebody's"}


def test_what_a_killed_upload_left_is_no_hindrance(planned: Conversion, model: Path, place: Store) -> None:
    contents = contents_of(model)
    for name in [*sorted(name for name in contents if name.startswith("model-"))[:2], "config.json"]:
        place.put(name, contents[name])
    assert told_early(planned, place.uri) == ""
    upload(model, place.uri, settings=FAST)
    assert told_early(planned, place.uri) == "", "nor is the model itself"
    assert place.read_all() == contents


def test_a_model_whose_record_lacks_a_source_is_still_told(planned: Conversion, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    record = {"format": 1, "fingerprint": "f", "files": {"a": {"bytes": 1, "sha256": "0" * 64}}, "source": ["odd"]}
    (there / MARKER_NAME).write_text(json.dumps(record))
    assert "found: that of some checkpoint, fingerprint f" in told_early(planned, there.as_uri())


# --- rights


def test_a_directory_that_cannot_be_written_is_told(planned: Conversion) -> None:
    assert "can't write there" in told_early(planned, "file:///proc/models/step-10")  # by root neither


def test_a_file_in_place_of_a_directory_is_told(planned: Conversion, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "Not a directory" in told_early(planned, (tmp_path / "file" / "step-10").as_uri())


@pytest.mark.service
def test_a_bucket_that_is_not_there_is_told(planned: Conversion, bucket: Bucket) -> None:
    assert "create the bucket" in told_early(planned, "s3://no-such-bucket-anywhere/models/step-10")


@pytest.mark.service
@pytest.mark.parametrize("is_refused", ["GET", "POST"], ids=["listing", "writing"])
def test_a_key_that_may_not_list_or_write_is_told(planned: Conversion, bucket: Bucket, is_refused: str) -> None:
    bucket.proxy.interfere = lambda request: (
        Answer(status=403, code="AccessDenied")
        if request.method == is_refused and request.key.strip("/") in (bucket.bucket, _marker_key(bucket))
        else None
    )
    told = told_early(planned, bucket.uri)
    assert "give this key the rights" in told
    bucket.proxy.interfere = None
    assert bucket.leftovers() == []


def _marker_key(bucket: Bucket) -> str:
    return f"{bucket.bucket}/{bucket.prefix}{MARKER_NAME}"


@pytest.mark.parametrize("is_there", [False, True])
def test_a_token_that_may_only_read_is_told(
    planned: Conversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    with running_hub(tmp_path / "hub") as hub:
        for name, value in (hub.environment() | {"HF_TOKEN": READ_TOKEN}).items():
            monkeypatch.setenv(name, value)
        if is_there:
            hub.create("tester/model", private=True)
        assert "right to write" in told_early(planned, "hf://tester/model")
        assert len(hub.repos) == is_there


def test_a_public_repository_and_a_wrong_license_are_told(
    planned: Conversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_hub(tmp_path / "hub") as hub:
        for name, value in hub.environment().items():
            monkeypatch.setenv(name, value)
        hub.create("tester/model", private=False)
        assert "the repository is public" in told_early(planned, "hf://tester/model")
        public = PublishSettings(visibility="public", license="apache")
        assert "--license" in told_early(planned, "hf://tester/model", settings=public)


def test_no_token_is_told(planned: Conversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_hub(tmp_path / "hub") as hub:
        for name, value in hub.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_TOKEN")
        with pytest.raises(PermanentPublishError, match="HF_TOKEN"):
            check_before_work(planned, Destination(uri="hf://tester/model", settings=FAST))
