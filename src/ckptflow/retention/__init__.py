"""Retention: which steps of a run may go, and how they go.

``plan_retention`` is pure; ``plan_root`` gathers what it needs to know from the disk and the destinations, and
``carry_out`` deletes. A step goes only where its model is proven to be published.
"""

from __future__ import annotations

from ckptflow.retention.policy import CheckpointFacts, Decision, KeepBest, RetentionPolicy, plan_retention
from ckptflow.retention.removal import Removal, carry_out, remove_leftovers
from ckptflow.retention.survey import RetentionRequest, plan_root, retain

__all__ = [
    "CheckpointFacts",
    "Decision",
    "KeepBest",
    "Removal",
    "RetentionPolicy",
    "RetentionRequest",
    "carry_out",
    "plan_retention",
    "plan_root",
    "remove_leftovers",
    "retain",
]
