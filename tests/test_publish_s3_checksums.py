"""How an object on S3 is proven: by the newest checksum that the server knows, or by reading it back."""

from __future__ import annotations

from pathlib import Path

import pytest
from boto3.s3.transfer import TransferConfig

from ckptflow.publish import PublishSettings, upload
from ckptflow.publish.digests import digest_part
from publishing import FAST, MIB, WEIGHT, Bucket, contents_of, write_model
from servers.proxy import Answer, Request

pytestmark = pytest.mark.service


@pytest.mark.parametrize(
    "answer",
    [
        Answer(status=501, code="NotImplemented", message="A header you provided implies functionality"),
        Answer(status=400, code="InvalidArgument", message="unknown header x-amz-checksum-sha256"),
        Answer(status=403, code="SignatureDoesNotMatch"),
    ],
    ids=lambda answer: answer.code,
)
def test_a_server_without_the_newer_checksums_gets_md5_and_the_log_says_why(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture, answer: Answer
) -> None:
    # https://github.com/boto/boto3/issues/4392
    model = write_model(tmp_path / "out", weight_bytes=(17 * MIB,))
    bucket.proxy.interfere = lambda request: (
        answer if any(name.startswith("x-amz-checksum") for name in request.headers) else None
    )
    record = upload(model, bucket.uri, settings=FAST)
    assert bucket.read_all() == contents_of(model)
    assert record.files[0].verified_by == "MD5 of parts (ETag)"
    assert caplog.text.count("from here on SHA256 instead") == 1
    assert caplog.text.count("when_required") == 1
    assert answer.code in caplog.text
    sent = [each for each in bucket.proxy.requests if each.is_content]
    assert all("content-md5" in each.headers for each in sent)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(status=501, code="NotImplemented", message="x-amz-checksum-crc64nvme is not yet supported"),
        Answer(status=400, code="InvalidRequest", message="Checksum algorithm provided is unsupported."),
    ],
    ids=lambda answer: answer.code,
)
def test_a_server_without_the_newest_checksum_gets_the_one_before_it(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture, answer: Answer
) -> None:
    def interfere(request: Request) -> Answer | None:
        asked = request.headers.get("x-amz-checksum-algorithm") == "CRC64NVME"
        return answer if asked or "x-amz-checksum-crc64nvme" in request.headers else None

    model = write_model(tmp_path / "out", weight_bytes=(17 * MIB, 100))
    bucket.proxy.interfere = interfere
    record = upload(model, bucket.uri, settings=FAST)
    assert bucket.read_all() == contents_of(model)
    assert {file.verified_by for file in record.files[:2]} == {"SHA-256 of parts", "SHA-256"}
    assert "from here on SHA256 instead" in caplog.text
    assert "when_required" not in caplog.text
    sent = [each for each in bucket.proxy.requests if each.is_content]
    assert all("x-amz-checksum-sha256" in each.headers for each in sent)


def test_an_object_that_another_tool_put_is_proven_by_the_checksum_that_it_carries(
    bucket: Bucket, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "out", weight_bytes=(20 * MIB,))
    content, key = (model / WEIGHT).read_bytes(), bucket.prefix + WEIGHT
    begun = bucket.client.create_multipart_upload(
        Bucket=bucket.bucket, Key=key, ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT"
    )
    parts = []
    for number, part in enumerate((content[: 7 * MIB], content[7 * MIB :]), start=1):
        checksum = digest_part(part, ["CRC64NVME"]).text("CRC64NVME")
        answer = bucket.client.upload_part(
            Bucket=bucket.bucket,
            Key=key,
            UploadId=begun["UploadId"],
            PartNumber=number,
            Body=part,
            ChecksumCRC64NVME=checksum,
        )
        parts.append({"PartNumber": number, "ETag": answer["ETag"]})
    bucket.client.complete_multipart_upload(
        Bucket=bucket.bucket, Key=key, UploadId=begun["UploadId"], MultipartUpload={"Parts": parts}
    )
    record = upload(model, bucket.uri, settings=FAST)
    (weight,) = (file for file in record.files if file.name == WEIGHT)
    assert (weight.outcome, weight.verified_by) == ("skipped", "CRC-64/NVME")


def test_an_upload_that_was_begun_with_another_checksum_is_not_gone_on_with(bucket: Bucket, tmp_path: Path) -> None:
    model = write_model(tmp_path / "out", weight_bytes=(20 * MIB,))
    content, key = (model / WEIGHT).read_bytes(), bucket.prefix + WEIGHT
    begun = bucket.client.create_multipart_upload(Bucket=bucket.bucket, Key=key, ChecksumAlgorithm="SHA256")
    first = content[: 8 * MIB]
    bucket.client.upload_part(
        Bucket=bucket.bucket,
        Key=key,
        UploadId=begun["UploadId"],
        PartNumber=1,
        Body=first,
        ChecksumSHA256=digest_part(first, ["SHA256"]).text("SHA256"),
    )
    record = upload(model, bucket.uri, settings=FAST)
    assert bucket.read_all() == contents_of(model)
    assert record.files[0].verified_by == "CRC-64/NVME"
    assert bucket.leftovers() == []


def test_when_required_sends_no_newer_checksums(bucket: Bucket, tmp_path: Path) -> None:
    settings = PublishSettings(checksum_mode="when_required", part_size_bytes=8 * MIB)
    upload(write_model(tmp_path / "out", weight_bytes=(9 * MIB,)), bucket.uri, settings=settings)
    assert not [each for each in bucket.proxy.requests if any("checksum" in name for name in each.headers)]


def test_an_object_of_unknown_parts_is_proven_by_its_bytes(bucket: Bucket, tmp_path: Path) -> None:
    # The ETag of a multipart object is no MD5: https://github.com/boto/boto3/issues/845
    model = write_model(tmp_path / "out", weight_bytes=(20 * MIB,))
    config = TransferConfig(multipart_threshold=5 * MIB, multipart_chunksize=7 * MIB)
    bucket.client.upload_file(str(model / WEIGHT), bucket.bucket, bucket.prefix + WEIGHT, Config=config)
    record = upload(model, bucket.uri, settings=FAST)
    assert (record.files[0].outcome, record.files[0].verified_by) == ("skipped", "sha256 read back")
