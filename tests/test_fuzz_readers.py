"""Random damage to small checkpoints of every layout: our own errors or the right values, and nothing else.

``CKPTFLOW_FUZZ_EXAMPLES`` is the number of inputs per layout; the default keeps the normal run short.
"""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz_mutations import KINDS, Mutation
from fuzz_seeds import SEEDS
from fuzzing import Undamaged, attempt, undamaged

EXAMPLES = int(os.environ.get("CKPTFLOW_FUZZ_EXAMPLES", "40"))
MUTATIONS = st.builds(
    Mutation,
    kind=st.sampled_from(sorted(KINDS)),
    file=st.integers(0, 63),
    at=st.floats(0, 1, exclude_max=True),
    value=st.integers(0, 255),
    length=st.integers(0, 63),
)


@cache
def directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ckptflow-fuzz-")


@cache
def seed(layout: str) -> Undamaged:
    root = Path(directory().name) / layout / "seed"
    root.mkdir(parents=True)
    return undamaged(layout, root, SEEDS[layout](root), root.parent / "out")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("layout", SEEDS)
def test_damage_is_refused_or_does_no_harm(layout: str) -> None:
    good = seed(layout)

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.lists(MUTATIONS, min_size=1, max_size=3))
    def try_one(mutations: list[Mutation]) -> None:
        with tempfile.TemporaryDirectory(dir=directory().name) as work:
            outcome = attempt(good, mutations, Path(work) / "work")
        assert outcome.kind != "wrong", outcome.detail

    try_one()


def test_the_undamaged_checkpoints_convert() -> None:
    for layout in SEEDS:
        good = seed(layout)
        assert good.values, layout
        assert set(good.ranges) == set(good.values), layout
