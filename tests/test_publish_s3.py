"""What only S3 can do wrong: keys, throttling, dropped connections, open uploads."""

from __future__ import annotations

import hashlib
import logging
import random
import time
from functools import partial
from pathlib import Path

import pytest

from ckptflow.errors import PermanentPublishError, TransientPublishError
from ckptflow.publish import MARKER_NAME, PublishSettings, upload
from ckptflow.publish.parts import plan_parts
from publishing import FAST, MIB, WEIGHT, Bucket, contents_of, write_model
from servers.proxy import DROP, Answer, Request
from servers.seaweed import ACCESS_KEY, SECRET_KEY, running_seaweed
from servers.tls import self_signed

pytestmark = pytest.mark.service


def assert_tells_no_secret(caught: pytest.ExceptionInfo[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    chain: list[BaseException] = [caught.value]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    told = caplog.text + "".join(f"{error} {error!r}" for error in chain)
    assert SECRET_KEY not in told
    assert ACCESS_KEY not in told


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("AWS_SECRET_ACCESS_KEY", SECRET_KEY + "x", "AWS_SECRET_ACCESS_KEY"),
        ("AWS_ACCESS_KEY_ID", ACCESS_KEY + "x", "AWS_ACCESS_KEY_ID"),
    ],
)
def test_wrong_keys_fail_at_once_with_the_cure_and_no_secret(
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: str,
    cure: str,
) -> None:
    caplog.set_level(logging.DEBUG, logger="ckptflow")
    monkeypatch.setenv(name, value)
    with pytest.raises(PermanentPublishError, match=cure) as caught:
        upload(write_model(tmp_path / "out"), bucket.uri, settings=FAST)
    assert len(bucket.proxy.requests) == 1
    assert_tells_no_secret(caught, caplog)


def test_a_key_that_a_server_repeats_is_not_passed_on(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="ckptflow")
    answer = Answer(status=503, code="SlowDown", message=f"slow down, {ACCESS_KEY} with {SECRET_KEY}")
    bucket.proxy.interfere = lambda _: answer
    with pytest.raises(TransientPublishError, match=r"slow down, \*\*\* with \*\*\*") as caught:
        upload(write_model(tmp_path / "out"), bucket.uri, settings=FAST)
    assert_tells_no_secret(caught, caplog)


def test_no_keys_at_all_fail_with_the_cure(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(PermanentPublishError, match="AWS_ACCESS_KEY_ID"):
        upload(write_model(tmp_path / "out"), bucket.uri, settings=FAST)


def test_a_missing_bucket_fails_at_once(bucket: Bucket, tmp_path: Path) -> None:
    with pytest.raises(PermanentPublishError, match="create the bucket"):
        upload(write_model(tmp_path / "out"), "s3://no-such-bucket-here/x", settings=FAST)
    assert len(bucket.proxy.requests) == 1


@pytest.mark.parametrize(
    ("status", "code"),
    [(403, "AccessDenied"), (403, "QuotaExceeded"), (507, "InsufficientStorage"), (403, "RequestTimeTooSkewed")],
)
def test_what_will_not_heal_is_tried_once(bucket: Bucket, tmp_path: Path, status: int, code: str) -> None:
    bucket.proxy.interfere = lambda request: Answer(status=status, code=code) if request.method == "PUT" else None
    with pytest.raises(PermanentPublishError, match="what to do"):
        upload(write_model(tmp_path / "out"), bucket.uri, settings=FAST)
    assert len(bucket.proxy.refused) == 1
    assert bucket.read_all() == {}


@pytest.mark.parametrize(
    "message",
    [
        "Access Denied because object protected by object lock.",
        "Object is WORM protected and cannot be overwritten",
        "",
    ],
)
def test_a_bucket_that_keeps_its_objects_is_told_from_a_key_without_rights(
    bucket: Bucket, tmp_path: Path, message: str
) -> None:
    upload(write_model(tmp_path / "out"), bucket.uri, settings=FAST)
    before = bucket.read_all()
    refusal = Answer(status=403, code="AccessDenied", message=message)
    bucket.proxy.interfere = lambda request: refusal if request.method == "DELETE" else None
    with pytest.raises(PermanentPublishError) as caught:
        upload(write_model(tmp_path / "other", seed=1), bucket.uri, settings=FAST, overwrite=True)
    assert ("(object lock)" in str(caught.value)) == (message != "")
    assert ("give this key the rights" in str(caught.value)) == (message == "")
    assert bucket.read_all() == before


HEALING = [
    Answer(status=503, code="SlowDown"),
    Answer(status=429, code="TooManyRequests", headers={"Retry-After": "0.2"}),
    Answer(status=500, code="InternalError"),
    Answer(status=400, code="BadDigest"),
    Answer(status=400, code="RequestTimeout"),
    Answer(status=400, code="IncompleteBody"),
    DROP,
]


@pytest.mark.parametrize("answer", HEALING, ids=lambda answer: answer.code or "dropped")
def test_what_heals_is_tried_again(bucket: Bucket, tmp_path: Path, answer: Answer) -> None:
    model = write_model(tmp_path / "out", weight_bytes=(17 * MIB,))
    seen: set[tuple[str, str, str]] = set()

    def each_request_fails_once(request: Request) -> Answer | None:
        name = (request.method, request.key, str(request.query) + request.headers.get("range", ""))
        is_first = name not in seen and request.method in ("PUT", "POST")
        seen.add(name)
        return answer if is_first else None

    bucket.proxy.interfere = each_request_fails_once
    upload(model, bucket.uri, settings=FAST)
    assert bucket.read_all() == contents_of(model)
    assert bucket.leftovers() == []
    assert len(bucket.proxy.contents()) == len(set(bucket.proxy.contents()))


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_says_when_to_come_back_is_not_asked_before(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    caplog.set_level(logging.INFO, logger="ckptflow")
    settings = PublishSettings(max_attempts=2, backoff_seconds=0.01, backoff_limit_seconds=0.1)
    answers = [Answer(status=status, code="SlowDown", headers={"Retry-After": "0.7"})]
    moments: list[float] = []

    def busy_once(request: Request) -> Answer | None:
        if request.method != "PUT":
            return None
        moments.append(time.monotonic())
        return answers.pop() if answers else None

    bucket.proxy.interfere = busy_once
    upload(write_model(tmp_path / "out"), bucket.uri, settings=settings)
    assert moments[1] - moments[0] >= 0.7
    assert "tried again in 0.7 s" in caplog.text


def test_a_file_after_one_that_failed_is_not_sent_on_and_one_before_it_is_finished(
    bucket: Bucket, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "out", weight_bytes=(40 * MIB, 40 * MIB, 40 * MIB))
    names = sorted(path.name for path in model.glob("*.safetensors"))
    bucket.proxy.interfere = lambda request: (
        Answer(status=403, code="AccessDenied") if request.is_content and request.key.endswith(names[1]) else None
    )
    settings = PublishSettings(part_size_bytes=8 * MIB, max_concurrency=2)
    with pytest.raises(PermanentPublishError, match="AccessDenied") as caught:
        upload(model, bucket.uri, settings=settings)
    assert names[1] in str(caught.value)
    assert set(bucket.sizes()) == {names[0]}
    # Parts of it may have been on their way when the one before it failed.
    assert len([key for key, _ in bucket.proxy.contents() if key.endswith(names[2])]) < 40 // 8
    assert len([each for each in bucket.proxy.refused if each.is_content]) <= settings.max_concurrency
    bucket.proxy.interfere = None
    upload(model, bucket.uri, settings=settings)
    assert bucket.read_all() == contents_of(model)
    assert bucket.leftovers() == []
    assert len(bucket.proxy.contents()) == len(set(bucket.proxy.contents()))


def test_a_limit_of_parts_makes_them_larger(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As S3's 10,000 do with a file of 160 GB: https://github.com/ddebeau/zfs_uploader/issues/25
    monkeypatch.setattr("ckptflow.publish.s3.plan_parts", partial(plan_parts, max_parts=3))
    bucket.proxy.interfere = lambda request: (
        Answer(status=400, code="InvalidArgument", message="Part number must be an integer between 1 and 3")
        if int(request.query.get("partNumber", "1")) > 3
        else None
    )
    model = write_model(tmp_path / "out", weight_bytes=(40 * MIB,))
    record = upload(model, bucket.uri, settings=FAST)
    assert bucket.read_all() == contents_of(model)
    assert record.files[0].verified_by == "CRC-64/NVME"
    assert {each.length for each in bucket.proxy.requests if "partNumber" in each.query} == {14 * MIB, 12 * MIB}


def test_what_does_not_heal_in_time_may_be_run_again(bucket: Bucket, tmp_path: Path) -> None:
    bucket.proxy.interfere = lambda request: Answer(status=503, code="SlowDown") if request.method == "PUT" else None
    model = write_model(tmp_path / "out")
    with pytest.raises(TransientPublishError):
        upload(model, bucket.uri, settings=FAST)
    assert len(bucket.proxy.refused) == FAST.max_attempts
    bucket.proxy.interfere = None
    upload(model, bucket.uri, settings=FAST)
    assert bucket.read_all() == contents_of(model)


def test_nobody_at_the_endpoint_may_heal(tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(TransientPublishError, match="check the network and the endpoint"):
        upload(write_model(tmp_path / "out"), bucket.uri, settings=FAST)


def test_a_server_without_conditional_writes_is_used_with_a_look_before(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer = Answer(status=501, code="NotImplemented", message="If-None-Match is not implemented")
    bucket.proxy.interfere = lambda request: answer if "if-none-match" in request.headers else None
    model = write_model(tmp_path / "out", weight_bytes=(17 * MIB,))
    upload(model, bucket.uri, settings=FAST)
    assert bucket.read_all() == contents_of(model)
    assert caplog.text.count("If-None-Match") >= 1
    assert all("x-amz-checksum-crc64nvme" in each.headers for each in bucket.proxy.requests if each.is_content)


def open_upload(
    bucket: Bucket, content: bytes, part_bytes: int, numbers: list[int], sha256: str = "of whom it began for"
) -> str:
    """What a killed run leaves behind: some parts of an upload that was not completed."""
    key = bucket.prefix + WEIGHT
    upload_id = bucket.client.create_multipart_upload(
        Bucket=bucket.bucket, Key=key, Metadata={"sha256": sha256, "part-bytes": str(part_bytes)}
    )["UploadId"]
    for number in numbers:
        part = content[(number - 1) * part_bytes : number * part_bytes]
        bucket.client.upload_part(Bucket=bucket.bucket, Key=key, UploadId=upload_id, PartNumber=number, Body=part)
    return upload_id


def test_parts_of_an_open_upload_are_not_sent_again(bucket: Bucket, tmp_path: Path) -> None:
    model = write_model(tmp_path / "out", weight_bytes=(40 * MIB,))
    bucket.proxy.interfere = lambda request: (
        Answer(status=403, code="AccessDenied") if request.query.get("partNumber") == "4" else None
    )
    with pytest.raises(PermanentPublishError):
        upload(model, bucket.uri, settings=PublishSettings(part_size_bytes=8 * MIB, max_concurrency=1))
    assert bucket.leftovers() == [bucket.prefix + WEIGHT]
    bucket.proxy.interfere = None
    upload(model, bucket.uri, settings=FAST)
    parts = [number for key, number in bucket.proxy.contents() if key.endswith(WEIGHT)]
    assert sorted(parts) == ["1", "2", "3", "4", "5"]
    assert bucket.read_all() == contents_of(model)
    assert bucket.leftovers() == []


def test_open_uploads_of_other_sizes_or_contents_are_aborted(bucket: Bucket, tmp_path: Path) -> None:
    model = write_model(tmp_path / "out", weight_bytes=(20 * MIB,))
    content = (model / WEIGHT).read_bytes()
    open_upload(bucket, content, 5 * MIB, [1, 2])
    open_upload(bucket, random.Random(1).randbytes(20 * MIB), 8 * MIB, [1, 2])
    open_upload(bucket, content, 8 * MIB, [])
    upload(model, bucket.uri, settings=FAST)
    assert bucket.read_all() == contents_of(model)
    assert bucket.leftovers() == []


def test_an_open_upload_of_another_file_with_equal_parts_does_not_leave_its_sha256(
    bucket: Bucket, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "out", weight_bytes=(20 * MIB,))
    content = (model / WEIGHT).read_bytes()
    open_upload(bucket, content, 8 * MIB, [1])
    record = upload(model, bucket.uri, settings=FAST)
    head = bucket.client.head_object(Bucket=bucket.bucket, Key=bucket.prefix + WEIGHT)
    assert head["Metadata"]["sha256"] == record.files[0].sha256
    assert bucket.read_all() == contents_of(model)
    assert bucket.leftovers() == []


def test_an_upload_that_somebody_aborts_is_begun_anew(bucket: Bucket, tmp_path: Path) -> None:
    model = write_model(tmp_path / "out", weight_bytes=(20 * MIB,))
    aborted: list[str] = []

    def abort_once(request: Request) -> Answer | None:
        if request.query.get("partNumber") == "2" and not aborted:
            aborted.append(request.query["uploadId"])
            bucket.client.abort_multipart_upload(
                Bucket=bucket.bucket, Key=bucket.prefix + WEIGHT, UploadId=request.query["uploadId"]
            )
        return None

    bucket.proxy.interfere = abort_once
    done: list[int] = []
    record = upload(model, bucket.uri, settings=FAST, progress=done.append)
    assert len(aborted) == 1
    assert sum(done) == record.total_bytes
    assert bucket.read_all() == contents_of(model)
    assert bucket.leftovers() == []


def test_the_completion_whose_answer_was_lost_is_found_again(bucket: Bucket, tmp_path: Path) -> None:
    model = write_model(tmp_path / "out", weight_bytes=(20 * MIB,))
    lost: list[Request] = []

    def lose_answer(request: Request) -> Answer | None:
        is_completion = request.method == "POST" and "uploadId" in request.query
        if lost or not is_completion:
            return None
        lost.append(request)
        bucket.complete(WEIGHT, request.query["uploadId"])
        return DROP

    bucket.proxy.interfere = lose_answer
    upload(model, bucket.uri, settings=FAST)
    assert len(lost) == 1
    assert bucket.read_all() == contents_of(model)
    parts_sent = [number for key, number in bucket.proxy.contents() if key.endswith(WEIGHT)]
    assert sorted(parts_sent) == ["1", "2", "3"]


@pytest.mark.parametrize("moment", ["uploads", "uploadId"])
def test_a_file_whose_completion_ends_after_the_first_look_is_not_sent_again(
    bucket: Bucket, tmp_path: Path, moment: str
) -> None:
    # A run was killed after it had asked for the completion: a server may take minutes for it.
    model = write_model(tmp_path / "out", weight_bytes=(20 * MIB,))
    content = (model / WEIGHT).read_bytes()
    upload_id = open_upload(bucket, content, 8 * MIB, [1, 2, 3], hashlib.sha256(content).hexdigest())
    completed: list[str] = []

    def complete_before(request: Request) -> None:
        if request.method == "GET" and moment in request.query and not completed:
            completed.append(upload_id)
            bucket.complete(WEIGHT, upload_id)

    bucket.proxy.interfere = complete_before
    record = upload(model, bucket.uri, settings=FAST)
    assert completed
    assert record.files[0].outcome == "skipped"
    assert not [key for key, _ in bucket.proxy.contents() if key.endswith(WEIGHT)]
    assert bucket.read_all() == contents_of(model)
    assert bucket.leftovers() == []


def test_what_a_kill_left_beside_a_finished_file_is_aborted(bucket: Bucket, tmp_path: Path) -> None:
    model = write_model(tmp_path / "out", weight_bytes=(20 * MIB,))
    content = (model / WEIGHT).read_bytes()
    upload(model, bucket.uri, settings=FAST)
    open_upload(bucket, content, 8 * MIB, [1])
    bucket.delete(MARKER_NAME)
    upload(model, bucket.uri, settings=FAST)
    assert bucket.leftovers() == []
    open_upload(bucket, content, 8 * MIB, [1])
    assert upload(model, bucket.uri, settings=FAST).already_published
    assert bucket.leftovers() == []


def test_it_works_over_tls_and_leaves_no_content_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_model(tmp_path / "out", weight_bytes=(17 * MIB,))
    with running_seaweed(tmp_path / "weed", tls=self_signed(tmp_path)) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        client = server.client()
        client.create_bucket(Bucket="over-tls")
        upload(model, "s3://over-tls/x", settings=FAST)
        head = client.head_object(Bucket="over-tls", Key=f"x/{WEIGHT}")
        marker = client.get_object(Bucket="over-tls", Key=f"x/{MARKER_NAME}")
        assert "ContentEncoding" not in dict(head)
        assert marker["Body"].read() == (model / MARKER_NAME).read_bytes()
        monkeypatch.delenv("AWS_CA_BUNDLE")
        with pytest.raises(PermanentPublishError, match="AWS_CA_BUNDLE") as caught:
            upload(model, "s3://over-tls/x", settings=FAST)
        assert_tells_no_secret(caught, caplog)
        client.close()
