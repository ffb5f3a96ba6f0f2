"""The files in deployments/ agree with the code and with each other; what a server makes of them, other tests see."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

DIRECTORY = Path(__file__).resolve().parents[1] / "deployments"
SITES = ("prefect.yaml", "kubernetes.yaml", "slurm.yaml")
SET_BY_DEPLOY = {"CKPTFLOW_ROOTS", "CKPTFLOW_DESTINATION", "CKPTFLOW_HEARTBEAT_SECONDS"}


def deployments(name: str) -> dict[str, dict[str, Any]]:
    content = yaml.safe_load((DIRECTORY / name).read_text("utf-8"))
    return {deployment["name"]: deployment for deployment in content["deployments"]}


@pytest.mark.parametrize("name", SITES)
def test_entrypoints_name_flows_with_the_parameters_that_are_set(name: str) -> None:
    for deployment in deployments(name).values():
        module, _, function = deployment["entrypoint"].rpartition(".")
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        (flow,) = [
            node
            for node in ast.parse(Path(spec.origin).read_text("utf-8")).body
            if isinstance(node, ast.FunctionDef) and node.name == function
        ]
        accepted = {argument.arg for argument in flow.args.args}
        set_here = set(deployment.get("parameters", {}))
        set_by_events = {n for trigger in deployment.get("triggers", []) for n in trigger["parameters"]}
        assert set_here | set_by_events <= accepted


@pytest.mark.parametrize("name", SITES)
def test_all_sites_have_the_same_deployments_in_the_pools_that_deploy_makes(name: str) -> None:
    pools = {key: each["work_pool"]["name"] for key, each in deployments(name).items()}
    assert {key: pools[key] for key in ("post-training", "sweep", "announced")} == {
        "post-training": "ckptflow-gpu",
        "sweep": "ckptflow",
        "announced": "ckptflow",
    }
    assert set(pools) == set(deployments("prefect.yaml"))


@pytest.mark.parametrize("name", SITES)
def test_no_event_starts_post_training_without_a_key(name: str) -> None:
    for deployment in deployments(name).values():
        assert deployment["pull"] == []
        assert "ckptflow" in deployment["tags"]
        if deployment["entrypoint"].endswith(".post_training"):
            assert "triggers" not in deployment


@pytest.mark.parametrize("name", SITES)
def test_variables_are_those_that_deploy_or_the_file_itself_tells_of(name: str) -> None:
    text = (DIRECTORY / name).read_text("utf-8")
    head = text[: text.index("\nname:")]
    for variable in set(re.findall(r"\{\{ \$(\w+) \}\}", text)):
        assert variable in SET_BY_DEPLOY or variable in head


def test_the_job_template_uses_no_variable_that_it_does_not_declare() -> None:
    template = json.loads((DIRECTORY / "kubernetes-job-template.json").read_text("utf-8"))
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    assert used == set(template["variables"]["properties"])


def test_units_start_programs_that_there_are() -> None:
    units = sorted((DIRECTORY / "systemd").glob("*.service"))
    assert len(units) == 3
    for path in units:
        unit = configparser.RawConfigParser(strict=False)
        unit.optionxform = str  # type: ignore[assignment]
        unit.read(path)
        assert re.match(r"/opt/ckptflow/bin/(prefect|ckptflow) \w+", unit["Service"]["ExecStart"])
        assert unit["Service"]["Restart"] == "always"


def test_the_batch_script_is_one() -> None:
    subprocess.run(["bash", "-n", str(DIRECTORY / "slurm-worker.sbatch")], check=True)
