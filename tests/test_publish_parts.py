"""How files are cut into parts, in which order they go, what a record may say: no store needed."""

from __future__ import annotations

import json
import threading
import time
from base64 import b64encode
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from hashlib import md5, sha256
from pathlib import Path

import pytest

from ckptflow.errors import PermanentPublishError, UsageError, VerificationError
from ckptflow.publish import MARKER_NAME, PublishSettings, open_target, read_local_model
from ckptflow.publish.digests import digest_object, digest_part
from ckptflow.publish.model import parse_marker, publish_order
from ckptflow.publish.parts import MAX_PARTS, MIB, PartPlan, plan_parts
from ckptflow.publish.slots import PartSlots, work_in_slots
from ckptflow.publish.verdicts import parse_retry_after
from publishing import contents_of, write_model, write_record

GB = 10**9
SHA = "0" * 64


def parts_of(plan: PartPlan) -> list[tuple[int, int]]:
    return [plan.part(number) for number in range(1, plan.count + 1)]


def test_60_gb_in_5_mb_parts_get_larger_parts() -> None:
    plan = plan_parts(60 * GB, 5 * MIB)
    assert plan.count <= MAX_PARTS
    assert plan.part_bytes == 6 * MIB


@pytest.mark.parametrize("max_parts", [1, 3, 20])
@pytest.mark.parametrize("total_bytes", [1, 5 * MIB, 5 * MIB + 1, 100 * MIB - 1, 100 * MIB, 100 * MIB + 1])
def test_parts_follow_each_other_and_cover_the_file(total_bytes: int, max_parts: int) -> None:
    plan = plan_parts(total_bytes, 5 * MIB, max_parts=max_parts)
    parts = parts_of(plan)
    assert len(parts) <= max_parts
    assert [offset for offset, _ in parts] == [sum(n for _, n in parts[:i]) for i in range(len(parts))]
    assert sum(length for _, length in parts) == total_bytes
    assert all(length == plan.part_bytes for _, length in parts[:-1])
    assert 0 < parts[-1][1] <= plan.part_bytes


@pytest.mark.parametrize("total_bytes", [5 << 40, (5 << 40) - 1, 10_000 * 16 * MIB, 10_000 * 16 * MIB + 1])
def test_no_file_that_s3_takes_needs_more_than_10000_parts(total_bytes: int) -> None:
    assert plan_parts(total_bytes, 16 * MIB).count <= MAX_PARTS


def test_an_empty_file_is_one_empty_part() -> None:
    assert parts_of(plan_parts(0, 16 * MIB)) == [(0, 0)]


def test_a_file_larger_than_an_object_is_refused_with_the_cure() -> None:
    with pytest.raises(PermanentPublishError, match="--max-shard-size"):
        plan_parts((5 << 40) + 1, 16 * MIB)


def test_an_object_of_parts_has_the_etag_and_the_checksums_that_s3_documents() -> None:
    contents = [b"1" * 1000, b"23456789", b""]
    digest = digest_object(SHA, [digest_part(content, ["CRC64NVME", "SHA256", "MD5"]) for content in contents])
    etag = md5(b"".join(md5(content).digest() for content in contents)).hexdigest() + "-3"
    sha256s = b"".join(sha256(content).digest() for content in contents)
    whole = digest_part(b"".join(contents), ["CRC64NVME"]).text("CRC64NVME")
    checksum = b64encode(sha256(sha256s).digest()).decode() + "-3"
    assert digest.digests == {"MD5": etag, "SHA256": checksum, "CRC64NVME": whole}


def test_an_object_has_the_digests_that_all_of_its_parts_have() -> None:
    digest = digest_object(SHA, [digest_part(b"a", ["SHA256", "MD5"]), digest_part(b"b", ["CRC64NVME", "SHA256"])])
    assert set(digest.digests) == {"SHA256"}


def test_an_object_put_whole_has_its_own_digests() -> None:
    digest = digest_object(SHA, [digest_part(b"123456789", ["CRC64NVME", "SHA256", "MD5"])])
    assert digest.digests == {
        # The check value of https://reveng.sourceforge.io/crc-catalogue/all.htm#crc.cat.crc-64-nvme
        "CRC64NVME": b64encode(bytes.fromhex("ae8b14860a799888")).decode(),
        "SHA256": b64encode(sha256(b"123456789").digest()).decode(),
        "MD5": md5(b"123456789").hexdigest(),
    }


def test_weights_go_first_and_the_index_last() -> None:
    names = [
        "model.safetensors.index.json",
        "config.json",
        "model-00002-of-00002.safetensors",
        "tokenizer.json",
        "model-00001-of-00002.safetensors",
    ]
    assert publish_order(names) == (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
    )


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "../x", "a/../x", "a//b", "./a", "a\\b", "a\0b", "ckptflow.json", ".ckptflow-upload-x", "a/"],
)
def test_a_record_that_names_a_file_elsewhere_is_refused(name: str) -> None:
    document = {"format": 1, "fingerprint": "f", "files": {name: {"bytes": 1, "sha256": SHA}}}
    with pytest.raises(ValueError, match="no name for a file"):
        parse_marker(json.dumps(document).encode())


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"format": 2, "fingerprint": "f", "files": {"a": {"bytes": 1, "sha256": SHA}}},
        {"format": 1, "fingerprint": "", "files": {"a": {"bytes": 1, "sha256": SHA}}},
        {"format": 1, "fingerprint": "f", "files": {}},
        {"format": 1, "fingerprint": "f", "files": {"a": {"bytes": -1, "sha256": SHA}}},
        {"format": 1, "fingerprint": "f", "files": {"a": {"bytes": True, "sha256": SHA}}},
        {"format": 1, "fingerprint": "f", "files": {"a": {"bytes": 1, "sha256": "short"}}},
        {"format": 1, "fingerprint": "f", "files": {"a": None}},
    ],
)
def test_a_record_without_its_facts_is_refused(document: object) -> None:
    with pytest.raises(ValueError, match=r"record|fingerprint|size"):
        parse_marker(json.dumps(document).encode())


@pytest.mark.parametrize("weight_file", ["../../other/model.safetensors", "/etc/hostname", "a/../../x.safetensors"])
def test_an_index_that_leads_out_of_the_model_is_refused(tmp_path: Path, weight_file: str) -> None:
    # https://github.com/huggingface/transformers/issues/47176
    model = write_model(tmp_path / "out")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"w": weight_file}}))
    write_record(model, [name for name in contents_of(model) if name != MARKER_NAME], fingerprint="f")
    with pytest.raises(VerificationError, match="index"):
        read_local_model(model)


@pytest.mark.parametrize(("text", "seconds"), [("2", 2.0), ("0.5", 0.5), ("-3", 0.0)])
def test_retry_after_may_be_seconds(text: str, seconds: float) -> None:
    assert parse_retry_after(text) == seconds


@pytest.mark.parametrize(("hours", "low", "high"), [(1, 3000.0, 3600.0), (-1, 0.0, 0.0)], ids=["to come", "over"])
def test_retry_after_may_be_a_date(hours: int, low: float, high: float) -> None:
    seconds = parse_retry_after(format_datetime(datetime.now(UTC) + timedelta(hours=hours), usegmt=True))
    assert seconds is not None
    assert low <= seconds <= high


@pytest.mark.parametrize("text", ["", "soon", "Fri, 99 Nov 2026"])
def test_a_retry_after_that_says_nothing_leaves_the_wait_to_the_backoff(text: str) -> None:
    assert parse_retry_after(text) is None


def test_parts_of_all_files_share_one_bound_on_number_and_bytes() -> None:
    slots = PartSlots(3, 25)
    in_memory: Counter[str] = Counter()
    most: Counter[str] = Counter()
    lock, order = threading.Lock(), []

    def count(parts: int, nbytes: int) -> None:
        with lock:
            in_memory.update(parts=parts, bytes=nbytes)
            most["parts"] = max(most["parts"], in_memory["parts"])
            most["bytes"] = max(most["bytes"], in_memory["bytes"])

    def send(lengths: list[int], name: str) -> list[int]:
        def read(place: int, memory: bytearray) -> None:
            order.append(name)
            count(1, len(memory))
            memory[:] = bytes([place]) * len(memory)

        def work(place: int, memory: bytearray) -> int:
            time.sleep(0.001)
            assert set(memory) == {place}  # nobody else writes there meanwhile
            count(-1, -len(memory))
            return len(memory)

        return work_in_slots(pool, slots, lengths, read, work)

    with ThreadPoolExecutor(8) as pool, ThreadPoolExecutor(2) as files:
        lengths = [[10] * 40, [5, 30] * 20]
        results = list(files.map(send, lengths, "ab"))
    assert results == lengths
    # One part alone may be larger than the budget.
    assert most["parts"] <= 3
    assert most["bytes"] == 30
    # Files follow each other, whichever came first.
    assert "".join(order) in ("a" * 40 + "b" * 40, "b" * 40 + "a" * 40)


def test_after_a_part_that_failed_no_further_one_is_read_and_no_slot_is_lost() -> None:
    slots, places = PartSlots(2, 100), []

    def read(place: int, memory: bytearray) -> None:
        places.append(place)

    def work(place: int, memory: bytearray) -> int:
        if place == 3:
            raise OSError("part 3")
        return place

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(OSError, match="part 3"):
            work_in_slots(pool, slots, [10] * 50, read, work)
        assert len(places) < 8
        assert work_in_slots(pool, slots, [10] * 9, read, lambda place, _: place) == list(range(9))


@pytest.mark.parametrize(
    "uri",
    [
        "ftp://user:hunter2@host/x",
        "models/here",
        "s3://",
        "s3:///prefix",
        "s3://user:hunter2@bucket/x",
        "file://host/dir",
        "file:///",
        "file:dir",
        "file://user:hunter2@host/dir",
        "file:///a%00b",
    ],
)
def test_an_address_that_is_none_is_wrong_usage_and_its_password_is_not_repeated(uri: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_target(uri, PublishSettings())
    assert "hunter2" not in str(caught.value)


def test_settings_that_can_not_work_are_wrong_usage() -> None:
    with pytest.raises(UsageError, match="part_size_bytes"):
        PublishSettings(part_size_bytes=5 * MIB)
    with pytest.raises(UsageError) as caught:
        PublishSettings(endpoint_url="http://user:hunter2@host")
    assert "hunter2" not in str(caught.value)
