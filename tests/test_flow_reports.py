"""What the artifacts say, without a server."""

from __future__ import annotations

import json
import re

from ckptflow.validate.report import Check, RoundingHistogram, ValidationReport
from ckptflow_tasks.artifacts import bars, pie, plain_rows
from ckptflow_tasks.proving import BARS, check_rows, report_markdown

GOOD = Check(name="values", status="passed", detail="equal", figures={"elements": 1234567, "largest error": 0.0018854})
BAD = Check(name="finite values", status="failed", detail="NaN in a|b\nand c")


def histogram(bins: int) -> RoundingHistogram:
    edges = tuple(index / 1000 for index in range(bins + 1))
    return RoundingHistogram(edges=edges, counts=tuple(range(bins)), exact=bins, sampled=sum(range(bins)) + bins)


def test_a_histogram_of_many_bins_is_drawn_with_few_bars_that_hold_all_of_them() -> None:
    for bins in (1, 7, 8, 32, 33):
        text = report_markdown(ValidationReport(checks=(GOOD,), rounding_histogram=histogram(bins)), "run step-1")
        values = json.loads(re.search(r"bar (\[.*\])", text)[1])  # type: ignore[index]
        labels = json.loads(re.search(r"x-axis (\[.*\])", text)[1])  # type: ignore[index]
        assert len(values) == len(labels) <= BARS
        assert labels[-1] == f"{bins / 10:.2f} %"
        total = sum(range(bins)) + bins
        assert abs(sum(values) - 100 * sum(range(bins)) / total) < 0.1


def test_a_failed_report_begins_with_what_failed() -> None:
    text = report_markdown(ValidationReport(checks=(GOOD, BAD)), "run step-1")
    assert text.startswith("# run step-1: validation failed\n\n- **finite values**: NaN in a|b")
    assert "finite values | failed | NaN in a\\|b and c | " in text


def test_figures_are_written_for_people() -> None:
    (row,) = check_rows([GOOD])
    assert row["figures"] == "elements 1,234,567, largest error 0.001885"


def test_a_cell_that_would_widen_the_table_is_cut() -> None:
    (row,) = check_rows([Check(name="dtypes", status="passed", detail="x" * 500)])
    assert len(row["detail"]) < 100
    assert row["detail"].endswith("…")


def test_one_dtype_needs_no_picture_and_several_get_one() -> None:
    one = report_markdown(ValidationReport(checks=(), bytes_by_dtype={"bfloat16": 2000}), "run")
    assert "All 2.00 kB are bfloat16." in one
    assert "mermaid" not in one
    two = report_markdown(ValidationReport(checks=(), bytes_by_dtype={"bfloat16": 2000, "float32": 10}), "run")
    assert '"bfloat16, 2.00 kB" : 2000' in two


def test_charts_carry_their_colors_as_json_that_mermaid_reads() -> None:
    for chart in (pie("Bytes", {"a": 1, "b": 0}), bars("Errors", ["x"], [0.0], "%")):
        (settings,) = re.findall(r"%%\{init: (.*)\}%%", chart)
        assert json.loads(settings)["theme"] == "base"
    assert '"b,' not in pie("Bytes", {"a": 1, "b": 0})
    assert "0 --> 1\n" in bars("Errors", ["x"], [0.0], "%")


def test_values_that_json_cannot_hold_become_text() -> None:
    rows = plain_rows([{"a": float("inf"), "b": float("nan"), "c": None, "d": (1, 2), "e": 0.5}])
    assert rows == [{"a": "inf", "b": "nan", "c": "", "d": "(1, 2)", "e": 0.5}]
