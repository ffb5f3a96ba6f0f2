"""Shrinks torch files in place: each storage is reduced to what its tensors use, and nothing else changes."""

from ckptflow.shrink.plan import ShrinkPlan, plan_shrink
from ckptflow.shrink.tree import DEFAULT_PATTERNS, ShrinkReport, ShrunkFile, candidate_bytes, shrink_tree

__all__ = [
    "DEFAULT_PATTERNS",
    "ShrinkPlan",
    "ShrinkReport",
    "ShrunkFile",
    "candidate_bytes",
    "plan_shrink",
    "shrink_tree",
]
