"""A stream is cut into parts that fit S3's limits and the memory budget, and holds no more than that."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptflow.errors import UsageError
from ckptflow.publish import PublishSettings
from ckptflow.publish.parts import MIB, PartPlan
from ckptflow.publish.streaming.parts import PartStream, fit_parts


def settings_of(**values: int) -> PublishSettings:
    return PublishSettings(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("total", "settings", "budget", "expected"),
    [
        (100 * MIB, settings_of(), 256 * MIB, (16 * MIB, 8)),
        (100 * MIB, settings_of(), 64 * MIB, (16 * MIB, 3)),
        (100 * MIB, settings_of(), 24 * MIB, (12 * MIB, 1)),
        (100 * MIB, settings_of(max_concurrency=2), 256 * MIB, (16 * MIB, 2)),
        # 10,000 parts of 16 MiB would not do.
        (300_000 * MIB, settings_of(), 256 * MIB, (30 * MIB, 7)),
    ],
)
def test_parts_are_fitted_to_the_budget(
    total: int, settings: PublishSettings, budget: int, expected: tuple[int, int]
) -> None:
    plan, in_flight = fit_parts(total, settings, budget)
    assert (plan.part_bytes, in_flight) == expected
    assert (in_flight + 1) * plan.part_bytes <= budget
    assert plan.count <= 10_000


def test_a_file_whose_parts_don_t_fit_the_budget_is_refused_with_both_figures() -> None:
    with pytest.raises(UsageError, match=r"2 parts of 31457280 bytes") as caught:
        fit_parts(300_000 * MIB, settings_of(), 32 * MIB)
    assert "max-shard-size" in str(caught.value)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_a_stream_is_cut_into_its_parts_and_holds_no_more_than_allowed(chunk: int) -> None:
    content = random.Random(chunk).randbytes(1000)
    plan = PartPlan(total_bytes=1000, part_bytes=64)
    busy, most, gate = 0, 0, threading.Lock()

    def work(number: int, part: bytes) -> tuple[int, bytes]:
        nonlocal busy, most
        with gate:
            busy += 1
            most = max(most, busy)
        taken = bytes(part)
        with gate:
            busy -= 1
        return number, taken

    with ThreadPoolExecutor(8) as pool, PartStream(plan, pool, 3, work) as parts:
        for at in range(0, 1000, chunk):
            parts.append(content[at : at + chunk])
        found = parts.finish()
    assert [number for number, _ in found] == list(range(1, 17))
    assert b"".join(part for _, part in found) == content
    assert most <= 3


@pytest.mark.parametrize("count", [999, 1001])
def test_a_stream_of_another_length_is_an_error(count: int) -> None:
    def cut() -> None:
        with PartStream(PartPlan(total_bytes=1000, part_bytes=64), pool, 1, lambda number, _: number) as parts:
            parts.append(bytes(count))
            parts.finish()

    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="1000 bytes"):
        cut()
