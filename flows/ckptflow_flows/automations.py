"""Automations that every site needs: runs whose process died are seen, and people hear of what went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound

from ckptflow.errors import UsageError

TAG = "ckptflow"
# Three heartbeats: two may be late on a busy machine. Prefect accepts no frequency below 30 s.
MISSED_HEARTBEATS = 3

# A bad checkpoint needs whoever trains; a broken machine needs whoever runs it.
NOTICES = {
    "ckptflow: checkpoint refused": (
        ("Refused",),
        "ckptflow refused a checkpoint",
        "The checkpoint is at fault, or its place is taken; it is not tried again until its files change.",
    ),
    "ckptflow: run failed": (
        ("Failed", "Crashed", "TimedOut"),
        "ckptflow failed",
        "The machine is at fault, not the checkpoint; it is tried again by itself.",
    ),
}


def dead_run_automation(heartbeat_seconds: int) -> AutomationCore:
    """A run of ours that sent heartbeats and then nothing at all is crashed, so that it is started again."""
    return AutomationCore(
        name="ckptflow: run died",
        description="Marks a run as crashed whose process sends no heartbeats any more.",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=_tagged(),
            for_each={"prefect.resource.id"},
            threshold=1,
            within=timedelta(seconds=MISSED_HEARTBEATS * heartbeat_seconds),
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                message=f"No sign of life for {MISSED_HEARTBEATS * heartbeat_seconds} s: its process or machine died.",
            )
        ],
    )


def notice_automations(block_document_id: UUID) -> list[AutomationCore]:
    """Tell about refused checkpoints and about failed runs, in words that tell them apart."""
    return [
        AutomationCore(
            name=name,
            description=f"Sends a notification when a run is {' or '.join(states)}.",
            trigger=EventTrigger(
                posture=Posture.Reactive,
                expect={f"prefect.flow-run.{state}" for state in states},
                match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
                match_related=_tagged(),
                threshold=1,
            ),
            actions=[
                SendNotification(
                    block_document_id=block_document_id,
                    subject=f"{subject}: {{{{ flow_run.name }}}}",
                    body="{{ flow_run.name }} is {{ flow_run.state.name }}.\n\n{{ flow_run.state.message }}\n\n"
                    f"{advice}\n{{{{ flow_run | ui_url }}}}",
                )
            ],
        )
        for name, (states, subject, advice) in NOTICES.items()
    ]


def _tagged() -> ResourceSpecification:
    return ResourceSpecification({"prefect.resource.id": f"prefect.tag.{TAG}", "prefect.resource.role": "tag"})


def notification_block_id(client: SyncPrefectClient, reference: str) -> UUID:
    """The id of the block ``TYPE/NAME``, such as ``slack-webhook/training``.

    Raises:
        UsageError: there is no such block.
    """
    kind, _, name = reference.partition("/")
    try:
        return client.read_block_document_by_name(name, kind).id
    except (ObjectNotFound, ValueError) as error:
        raise UsageError(
            "the server has no such notification block",
            expected="TYPE/NAME of a block, such as slack-webhook/training",
            found=reference,
            fix="make it in the UI under Blocks, or with `prefect block create`",
        ) from error


def apply_automations(client: SyncPrefectClient, wanted: Sequence[AutomationCore]) -> None:
    """Create those that are missing and bring the others up to date; found by name, so that none comes twice.

    One that is disabled stays so: that was a person's decision.
    """
    for automation in wanted:
        there = client.read_automations_by_name(automation.name)
        if not there:
            client.create_automation(automation)
            continue
        first, *doubles = there
        for double in doubles:
            client.delete_automation(double.id)
        if _content(first) != _content(automation):
            client.update_automation(first.id, automation.model_copy(update={"enabled": first.enabled}))


def remove_automations(client: SyncPrefectClient, names: Sequence[str]) -> None:
    """Delete automations by name."""
    for name in names:
        for automation in client.read_automations_by_name(name):
            client.delete_automation(automation.id)


def _content(automation: AutomationCore) -> dict[str, Any]:
    return automation.model_dump(mode="json", include={"description", "trigger", "actions"})
