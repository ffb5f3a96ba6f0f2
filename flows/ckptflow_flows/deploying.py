"""``ckptflow deploy``: all that a server needs to run by itself. Safe to run again, after changes too."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from prefect.workers.utilities import get_default_base_job_template_for_infrastructure_type

from ckptflow.errors import CkptflowError, UsageError
from ckptflow_flows.automations import (
    NOTICES,
    apply_automations,
    dead_run_automation,
    notice_automations,
    notification_block_id,
    remove_automations,
)
from ckptflow_flows.worker import POOL_TYPE

GPU_POOL, CPU_POOL = "ckptflow-gpu", "ckptflow"
# Prefect's name of the limit behind a tag.
GPU_LIMIT = "tag:gpu"
DEPLOY_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a site decides.

    Attributes:
        file: the deployments.
        roots: directories that hold runs.
        destinations: where models are published, as texts.
        gpus: tasks that compute on tensors at a time, on all machines of this server together; None: no limit.
        runs_at_once: runs of post-training at a time; None: as many as the workers take.
        pool_type: of both work pools; None: new ones get our own type, those that are there keep theirs.
        job_template: file with the base job template of new pools; None: the type's default.
        heartbeat_seconds: how often a run says that it lives.
        notify: ``TYPE/NAME`` of the notification block; None: no notifications.
        variables: more that the file may name as ``{{ $NAME }}``.
    """

    file: Path
    roots: tuple[Path, ...]
    destinations: tuple[str, ...]
    gpus: int | None = 1
    runs_at_once: int | None = 2
    pool_type: str | None = None
    job_template: Path | None = None
    heartbeat_seconds: int = 30
    notify: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def deploy(site: Site) -> list[str]:
    """Set up pools, limit, deployments and automations; gives one line for each.

    Raises:
        UsageError: no server is named, or a file or block is missing.
        CkptflowError: Prefect refused a deployment.
    """
    if not get_current_settings().api.url:
        raise UsageError("no Prefect server is named", fix="start one, and set PREFECT_API_URL")
    if not site.file.is_file():
        raise UsageError("no such file with deployments", found=site.file, fix="name it with --file")
    if site.job_template is not None and not site.job_template.is_file():
        raise UsageError("no such job template", found=site.job_template, fix="name it with --job-template")
    done = []
    with get_client(sync_client=True) as client:
        for pool, limit in ((GPU_POOL, site.runs_at_once), (CPU_POOL, None)):
            done.append(_set_up_pool(client, pool, limit, site))
        done.append(_set_up_limit(client, site.gpus))
        _run_prefect_deploy(site)
        done += [f"deployment {name}" for name in _deployments_of(site.file)]
        wanted = [dead_run_automation(site.heartbeat_seconds)]
        if site.notify is None:
            remove_automations(client, tuple(NOTICES))
        else:
            wanted += notice_automations(notification_block_id(client, site.notify))
        apply_automations(client, wanted)
        done += [f"automation {automation.name!r}" for automation in wanted]
    return done


def _set_up_pool(client: SyncPrefectClient, name: str, limit: int | None, site: Site) -> str:
    try:
        found = client.read_work_pool(name)
    except ObjectNotFound:
        pool_type = site.pool_type or POOL_TYPE
        template = _job_template(site.job_template, pool_type)
        client.create_work_pool(
            WorkPoolCreate(name=name, type=pool_type, concurrency_limit=limit, base_job_template=template)
        )
        return f"work pool {name} ({pool_type}), new"
    if site.pool_type not in (None, found.type):
        raise UsageError(
            f"the work pool {name} is there with another type",
            expected=site.pool_type,
            found=found.type,
            fix=f"delete it (`prefect work-pool delete {name}`), or choose --pool-type {found.type}",
        )
    if found.concurrency_limit != limit:
        client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=limit))
    return f"work pool {name} ({found.type})"


def _job_template(file: Path | None, pool_type: str) -> dict[str, Any]:
    if file is not None:
        content: dict[str, Any] = yaml.safe_load(file.read_text("utf-8"))
        return content
    template = asyncio.run(get_default_base_job_template_for_infrastructure_type(pool_type))
    if template is None:
        raise UsageError(
            "Prefect does not know this type of work pool",
            found=pool_type,
            fix=f"pip install prefect-{pool_type}, or name its --job-template",
        )
    return template


def _set_up_limit(client: SyncPrefectClient, gpus: int | None) -> str:
    if gpus is None:
        with suppress(ObjectNotFound):
            client.delete_global_concurrency_limit_by_name(GPU_LIMIT)
        return "no limit on the tag gpu"
    # A tag without a limit has no effect, and nobody says so.
    client.upsert_global_concurrency_limit_by_name(GPU_LIMIT, gpus)
    return f"limit {gpus} on the tag gpu"


def _run_prefect_deploy(site: Site) -> None:
    """Prefect's own command reads the file: it knows triggers, schedules and templates."""
    variables = {
        "CKPTFLOW_ROOTS": os.pathsep.join(str(root) for root in site.roots),
        "CKPTFLOW_DESTINATION": " ".join(site.destinations),
        "CKPTFLOW_HEARTBEAT_SECONDS": str(site.heartbeat_seconds),
        "NO_COLOR": "1",
        **site.variables,
    }
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(site.file)]
    ran = subprocess.run(
        command,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=DEPLOY_TIMEOUT_SECONDS,
        check=False,
    )
    if ran.returncode != 0:
        raise CkptflowError(
            "`prefect deploy` failed", file=site.file, found="\n" + (ran.stdout + ran.stderr).strip()[-3000:]
        )


def _deployments_of(file: Path) -> list[str]:
    content = yaml.safe_load(file.read_text("utf-8"))
    return [str(deployment["name"]) for deployment in content["deployments"]]
