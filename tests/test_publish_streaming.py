"""Streaming to S3 without a local copy: the same objects as by way of a directory, and nothing of them on the disk."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ckptflow.convert import convert
from ckptflow.engine.inorder import weight_file_bytes
from ckptflow.errors import (
    CorruptFileError,
    OutputError,
    PermanentPublishError,
    TransientPublishError,
    UsageError,
    ValueRefusedError,
    VerificationError,
)
from ckptflow.publish import MARKER_NAME, PublishSettings, upload
from ckptflow.publish.parts import MIB
from ckptflow.publish.streaming import claim_stream, prepare_stream, prove_stream, publish_stream, stream, stream_file
from ckptflow.validate.stored import ForwardOptions
from publishing import Bucket, contents_of
from servers.proxy import DROP, Answer, Request
from servers.seaweed import running_seaweed
from servers.tls import self_signed
from streaming import SETTINGS, request_for, start_streaming, streaming_to, write_checkpoint
from validation import flip_bit

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("streamed") / "run")


@pytest.fixture(scope="module")
def local(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model directory that the local way makes."""
    out = tmp_path_factory.mktemp("local") / "model"
    convert(request_for(checkpoint, out))
    return out


def sent_twice(bucket: Bucket) -> list[tuple[str, str]]:
    """Objects and parts that reached the server more than once."""
    return [content for content, count in Counter(bucket.proxy.contents()).items() if count > 1]


def damage_object(bucket: Bucket, name: str) -> None:
    """Turn the last bit of an object."""
    content = bytearray(bucket.read_all()[name])
    content[-1] ^= 1
    bucket.delete(name)
    bucket.put(name, bytes(content))


# --- the same model, and nothing on the disk


def test_the_objects_are_those_of_the_local_way_and_no_file_of_theirs_lies_on_the_disk(
    bucket: Bucket, checkpoint: Path, local: Path, tmp_path: Path
) -> None:
    largest = 0

    def look(_: int) -> None:
        nonlocal largest
        sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
        largest = max([largest, *sizes])

    record, report = stream(streaming_to(bucket.uri, checkpoint, tmp_path / "work"), progress=look)
    expected = contents_of(local)
    assert bucket.read_all() == expected
    assert max(len(content) for content in expected.values()) > 16 * MIB
    assert 0 < largest < MIB, "only digests and side files"
    assert list(tmp_path.iterdir()) == [], "the work directory is gone"
    assert report is not None
    assert report.passed
    assert {check.name for check in report.checks if check.status != "passed"} <= {
        "checksums in the source",
        "generation config",
    }
    assert (report.differing_elements, report.tensors_compared) == (
        0,
        len(json.loads(expected[MARKER_NAME])["tensors"]),
    )
    assert not record.already_published
    assert {file.outcome for file in record.files} == {"sent"}
    weights = [name for name in expected if name.endswith(".safetensors")]
    arrival = bucket.names_by_arrival()
    assert sorted(arrival[: len(weights)]) == sorted(weights)
    assert arrival[-2:] == ["model.safetensors.index.json", MARKER_NAME]
    assert (sent_twice(bucket), bucket.leftovers()) == ([], [])


def test_the_local_way_finds_the_model_proven_and_sends_nothing(
    bucket: Bucket, checkpoint: Path, local: Path, tmp_path: Path
) -> None:
    stream(streaming_to(bucket.uri, checkpoint, tmp_path))
    bucket.proxy.requests.clear()
    record = upload(local, bucket.uri, settings=SETTINGS)
    assert record.already_published
    bucket.delete(MARKER_NAME)
    record = upload(local, bucket.uri, settings=SETTINGS)
    assert [file.name for file in record.files if file.outcome == "sent"] == [MARKER_NAME]
    assert len(bucket.proxy.contents()) == 1
    assert {f.verified_by for f in record.files if f.bytes > 16 * MIB} == {"MD5 of parts (ETag)"} or {
        f.verified_by for f in record.files if f.bytes > 16 * MIB
    } == {"CRC-64/NVME"}


def test_streaming_finds_what_the_local_way_sent_and_sends_none_of_it(
    bucket: Bucket, checkpoint: Path, local: Path, tmp_path: Path
) -> None:
    upload(local, bucket.uri, settings=SETTINGS)
    bucket.proxy.requests.clear()
    record, report = stream(streaming_to(bucket.uri, checkpoint, tmp_path))
    assert record.already_published
    assert report is None
    bucket.delete(MARKER_NAME)
    record, report = stream(streaming_to(bucket.uri, checkpoint, tmp_path))
    assert report is not None
    assert [file.name for file in record.files if file.outcome == "sent"] == [MARKER_NAME]
    assert len(bucket.proxy.contents()) == 1


def test_a_published_model_that_lost_a_file_is_healed(
    bucket: Bucket, checkpoint: Path, local: Path, tmp_path: Path
) -> None:
    upload(local, bucket.uri, settings=SETTINGS)
    (name, *_) = sorted(local.glob("*.safetensors"))
    damage_object(bucket, name.name)
    bucket.proxy.requests.clear()
    record, _ = stream(streaming_to(bucket.uri, checkpoint, tmp_path))
    assert bucket.read_all() == contents_of(local)
    assert [file.name for file in record.files if file.outcome == "sent"] == [name.name, MARKER_NAME]


def test_it_works_over_tls(checkpoint: Path, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_seaweed(tmp_path / "weed", tls=self_signed(tmp_path)) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        client = server.client()
        client.create_bucket(Bucket="over-tls")
        stream(streaming_to("s3://over-tls/x", checkpoint, tmp_path / "work"))
        for name, content in contents_of(local).items():
            assert client.get_object(Bucket="over-tls", Key=f"x/{name}")["Body"].read() == content
        client.close()


def test_a_server_without_the_newer_checksums_is_proven_by_md5(
    bucket: Bucket, checkpoint: Path, local: Path, tmp_path: Path
) -> None:
    settings = PublishSettings(part_size_bytes=8 * MIB, checksum_mode="when_required")
    record, _ = stream(streaming_to(bucket.uri, checkpoint, tmp_path, settings=settings))
    assert bucket.read_all() == contents_of(local)
    assert {f.verified_by for f in record.files if f.bytes > 16 * MIB} == {"MD5 of parts (ETag)"}


# --- kills, faults, and others at the same place


def test_a_kill_costs_at_most_the_parts_in_flight(
    bucket: Bucket, checkpoint: Path, local: Path, tmp_path: Path
) -> None:
    for parts_before in (2, 2, 2):  # within the first file, between it and the second, and within the third
        killed_after(parts_before, bucket, checkpoint, tmp_path)
        assert not {MARKER_NAME, "config.json", "model.safetensors.index.json"} & set(bucket.sizes())
    record, _ = stream(streaming_to(bucket.uri, checkpoint, tmp_path))
    assert bucket.read_all() == contents_of(local)
    assert {file.outcome for file in record.files} == {"sent"}
    assert (sent_twice(bucket), bucket.leftovers()) == ([], [])
    assert list(tmp_path.iterdir()) == []


def killed_after(parts_before: int, bucket: Bucket, checkpoint: Path, work: Path) -> None:
    """Start streaming in a process, and kill -9 it when it sends content after so many parts."""
    running: list[subprocess.Popen[str]] = []
    started, lock = threading.Event(), threading.Lock()
    count = 0

    def kill(request: Request) -> Answer | None:
        nonlocal count
        with lock:
            count += request.is_content
            if count <= parts_before:
                return None
        started.wait()
        running[0].kill()
        return DROP

    bucket.proxy.interfere = kill
    running.append(start_streaming(bucket.uri, checkpoint, work))
    started.set()
    running[0].communicate()
    assert running[0].returncode == -9
    bucket.proxy.interfere = None
    bucket.proxy.settle()  # a part that the server gets only now is not listed yet, and would be sent again


def test_a_file_whose_completion_ends_after_the_first_look_is_not_sent_again(
    bucket: Bucket, checkpoint: Path, local: Path, tmp_path: Path
) -> None:
    asked: list[Request] = []

    def lose(request: Request) -> Answer | None:
        if request.method == "POST" and "uploadId" in request.query:
            asked.append(request)
        return DROP if asked else None  # nothing more is heard of the store

    bucket.proxy.interfere = lose
    with pytest.raises(TransientPublishError):
        stream(streaming_to(bucket.uri, checkpoint, tmp_path))
    completed: list[Request] = []

    def complete(request: Request) -> None:
        if request.method == "GET" and "uploads" in request.query and not completed:
            completed.append(request)
            name = asked[0].key.removeprefix(f"{bucket.bucket}/{bucket.prefix}")
            bucket.complete(name, asked[0].query["uploadId"])

    bucket.proxy.interfere = complete
    stream(streaming_to(bucket.uri, checkpoint, tmp_path))
    assert completed
    assert bucket.read_all() == contents_of(local)
    assert (sent_twice(bucket), bucket.leftovers()) == ([], [])


def test_without_its_work_directory_a_killed_run_is_compared_and_not_sent_again(
    bucket: Bucket, checkpoint: Path, local: Path, tmp_path: Path
) -> None:
    killed_after(4, bucket, checkpoint, tmp_path / "first")
    record, _ = stream(streaming_to(bucket.uri, checkpoint, tmp_path / "second"))
    assert bucket.read_all() == contents_of(local)
    assert [f.outcome for f in record.files][:2] == ["skipped", "sent"]
    assert (sent_twice(bucket), bucket.leftovers()) == ([], [])


@pytest.mark.parametrize(
    "answer",
    [Answer(status=503, code="SlowDown"), Answer(status=500, code="InternalError"), DROP],
    ids=lambda answer: answer.code or "dropped",
)
def test_what_heals_is_tried_again(
    bucket: Bucket, checkpoint: Path, local: Path, tmp_path: Path, answer: Answer
) -> None:
    seen: set[tuple[str, str, str, str]] = set()

    def once(request: Request) -> Answer | None:
        what = (request.method, request.key, str(sorted(request.query)), request.headers.get("range", ""))
        if what in seen:
            return None
        seen.add(what)
        return answer

    bucket.proxy.interfere = once
    stream(streaming_to(bucket.uri, checkpoint, tmp_path))
    assert bucket.read_all() == contents_of(local)
    assert bucket.leftovers() == []


def test_a_store_that_stays_away_may_be_tried_again_and_goes_on_there(
    bucket: Bucket, checkpoint: Path, local: Path, tmp_path: Path
) -> None:
    count = 0

    def after_four(request: Request) -> Answer | None:
        nonlocal count
        count += request.is_content
        return Answer(status=503, code="SlowDown") if request.is_content and count > 4 else None

    bucket.proxy.interfere = after_four
    with pytest.raises(TransientPublishError):
        stream(streaming_to(bucket.uri, checkpoint, tmp_path))
    bucket.proxy.interfere = None
    stream(streaming_to(bucket.uri, checkpoint, tmp_path))
    assert bucket.read_all() == contents_of(local)
    assert (sent_twice(bucket), bucket.leftovers()) == ([], [])


def test_an_upload_that_somebody_aborts_is_begun_anew(
    bucket: Bucket, checkpoint: Path, local: Path, tmp_path: Path
) -> None:
    aborted = []

    def abort(request: Request) -> None:
        if request.query.get("partNumber") == "2" and not aborted:
            aborted.append(request.query["uploadId"])
            key = request.key.removeprefix(f"{bucket.bucket}/")
            bucket.client.abort_multipart_upload(Bucket=bucket.bucket, Key=key, UploadId=aborted[0])

    bucket.proxy.interfere = abort
    stream(streaming_to(bucket.uri, checkpoint, tmp_path))
    assert aborted
    assert bucket.read_all() == contents_of(local)
    assert bucket.leftovers() == []


def test_two_publishers_at_once_make_one_model(bucket: Bucket, checkpoint: Path, local: Path, tmp_path: Path) -> None:
    both = [start_streaming(bucket.uri, checkpoint, tmp_path / name) for name in ("a", "b")]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    records = [json.loads(stdout) for stdout, _ in said]
    assert len({record["fingerprint"] for record in records}) == 1
    assert bucket.read_all() == contents_of(local)
    assert bucket.leftovers() == []
    markers = [key for key, _ in bucket.proxy.contents() if key.endswith(MARKER_NAME)]
    assert len(markers) in (1, 2), "the second may have tried, and was told that there is one"


def test_the_local_way_and_streaming_at_once_make_one_model(
    bucket: Bucket, checkpoint: Path, local: Path, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(2) as pool:
        sent = pool.submit(upload, local, bucket.uri, settings=SETTINGS)
        streamed = pool.submit(stream, streaming_to(bucket.uri, checkpoint, tmp_path))
        assert sent.result().fingerprint == streamed.result()[0].fingerprint
    assert bucket.read_all() == contents_of(local)
    assert bucket.leftovers() == []


# --- refusals leave nothing


def test_nan_in_the_last_file_leaves_no_object_and_no_open_upload(bucket: Bucket, tmp_path: Path) -> None:
    def spoil(full: torch.Tensor) -> torch.Tensor:
        full[-1, -1] = torch.nan
        return full

    path = write_checkpoint(tmp_path / "run", changes={"lm_head.weight": spoil})
    with pytest.raises(ValueRefusedError, match=r"lm_head\.weight"):
        stream(streaming_to(bucket.uri, path, tmp_path / "work"))
    assert any(part for _, part in bucket.proxy.contents()), "files before it were sent"
    assert (bucket.read_all(), bucket.leftovers()) == ({}, [])
    assert not (tmp_path / "work").exists()


def test_a_proof_that_fails_takes_away_what_was_sent(bucket: Bucket, checkpoint: Path, tmp_path: Path) -> None:
    streaming = streaming_to(bucket.uri, checkpoint, tmp_path)
    done = 0

    def damage(done_bytes: int) -> None:
        nonlocal done
        done += done_bytes
        if done == sum(weight_file_bytes(file) for file in streaming.files):
            damage_object(bucket, streaming.files[0].name)

    with pytest.raises(VerificationError) as caught:
        stream(streaming, progress=damage)
    told = str(caught.value)
    assert "sha256 of files" in told
    assert "1 of" in told
    assert "elements differ" in told
    assert (bucket.read_all(), bucket.leftovers()) == ({}, [])


def test_an_object_that_changes_while_it_is_proven_is_noticed(bucket: Bucket, checkpoint: Path, tmp_path: Path) -> None:
    swapped: list[str] = []

    def swap(request: Request) -> None:
        if request.method == "GET" and "range" in request.headers and not swapped:
            name = request.key.rsplit("/", 1)[1]
            swapped.append(name)
            damage_object(bucket, name)

    bucket.proxy.interfere = swap
    with pytest.raises(TransientPublishError, match="changed while it was read"):
        stream(streaming_to(bucket.uri, checkpoint, tmp_path))
    assert swapped
    assert MARKER_NAME not in bucket.sizes()


def test_another_model_and_strangers_are_refused_before_the_first_byte_and_replaced_where_asked(
    bucket: Bucket, checkpoint: Path, local: Path, tmp_path: Path
) -> None:
    other = convert_other(checkpoint, tmp_path)
    upload(other, bucket.uri, settings=SETTINGS)
    bucket.proxy.requests.clear()
    with pytest.raises(PermanentPublishError, match="holds another model"):
        stream(streaming_to(bucket.uri, checkpoint, tmp_path))
    bucket.delete(MARKER_NAME)
    with pytest.raises(PermanentPublishError, match="not of this model"):
        stream(streaming_to(bucket.uri, checkpoint, tmp_path))
    bucket.put("optimizer.pt", b"of a training")
    with pytest.raises(PermanentPublishError, match="checkpoint of a trainer"):
        stream(streaming_to(bucket.uri, checkpoint, tmp_path, overwrite=True))
    bucket.delete("optimizer.pt")
    assert bucket.proxy.contents() == []
    bucket.put(MARKER_NAME, (other / MARKER_NAME).read_bytes())
    stream(streaming_to(bucket.uri, checkpoint, tmp_path, overwrite=True))
    assert bucket.read_all() == contents_of(local)


def convert_other(checkpoint: Path, tmp_path: Path) -> Path:
    """Another model of the same checkpoint, some of whose files have the names of ours."""
    out = tmp_path / "other"
    convert(request_for(checkpoint, out, dtype="float16"))
    return out


def test_a_weight_file_of_that_name_with_another_content_is_refused(
    bucket: Bucket, checkpoint: Path, local: Path, tmp_path: Path
) -> None:
    (name, *_) = sorted(path.name for path in local.glob("*.safetensors"))
    content = bytearray((local / name).read_bytes())
    content[-1] ^= 1
    bucket.put(name, bytes(content))
    with pytest.raises(PermanentPublishError, match=name):
        stream(streaming_to(bucket.uri, checkpoint, tmp_path))
    assert bucket.read_all() == {name: bytes(content)}, "a stranger's file is not touched"


def test_a_checkpoint_whose_bytes_changed_since_torch_saved_them_is_not_published(
    bucket: Bucket, checkpoint: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged" / checkpoint.name
    shutil.copytree(checkpoint, damaged)
    piece = streaming_to(bucket.uri, damaged, tmp_path).conversion.plan.tensors[-1].source.pieces[0]
    flip_bit(Path(piece.file.path), piece.offset_bytes)
    with pytest.raises(CorruptFileError, match="changed after torch saved"):
        stream(streaming_to(bucket.uri, damaged, tmp_path))
    assert not [name for name in bucket.read_all() if name.endswith(".json")], "nothing makes a model of what is there"


@pytest.mark.parametrize("uri", ["file:///tmp/x", "hf://org/name", "nowhere"])
def test_only_s3_takes_a_model_without_a_local_copy(checkpoint: Path, tmp_path: Path, uri: str) -> None:
    with pytest.raises(UsageError, match="leave out --no-local-copy"):
        stream(streaming_to(uri, checkpoint, tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_budget_that_holds_no_two_parts_is_refused_before_anything_is_sent(
    bucket: Bucket, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="memory budget is too small"):
        stream(streaming_to(bucket.uri, checkpoint, tmp_path, request={"memory_budget_bytes": 16 * MIB}))
    assert bucket.proxy.contents() == []


def test_a_model_that_was_not_proven_is_not_published(bucket: Bucket, checkpoint: Path, tmp_path: Path) -> None:
    streaming = streaming_to(bucket.uri, checkpoint, tmp_path)
    with claim_stream(streaming):
        prepare_stream(streaming)
        with pytest.raises(OutputError, match="was not streamed"):
            publish_stream(streaming)
        for number in range(len(streaming.files)):
            stream_file(streaming, number)
        with pytest.raises(OutputError, match="was not proven"):
            publish_stream(streaming)


# --- the forward pass


def test_the_forward_pass_fetches_a_model_that_fits_and_is_skipped_with_the_reason_else(
    bucket: Bucket, checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="ckptflow")
    streaming = streaming_to(bucket.uri, checkpoint, tmp_path)
    with claim_stream(streaming):
        prepare_stream(streaming)
        for number in range(len(streaming.files)):
            stream_file(streaming, number)
        fetched = prove_stream(streaming, forward=ForwardOptions())
        left = prove_stream(streaming, forward=ForwardOptions(fetch_limit_bytes=MIB))
        assert not list(tmp_path.rglob("fetched-*"))
    by_name = [{check.name: check for check in report.checks}["forward pass"] for report in (fetched, left)]
    assert [check.status for check in by_name] == ["passed", "skipped"]
    assert "there is no local copy" in by_name[1].detail
