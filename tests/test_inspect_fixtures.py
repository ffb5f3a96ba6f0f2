"""``inspect`` says of each real checkpoint what the person who made it wrote down in its README."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from ckptflow.inspection import inspect_checkpoint

LAYOUTS = {
    "acc-fsdp1-full": "full-state-dict",
    "acc-": "dcp",
    "dcp_hf": "dcp-hf",
    "dcp_": "dcp",
    "ds": "deepspeed",
    "fsdp": "fsdp",
    "tracker": "fsdp",
    "hf-": "huggingface",
    "legacy-torch": "huggingface",
    "trainer-plain": "huggingface",
    "trainer-ds": "deepspeed",
    "lightning": "lightning",
    "meg_dist": "megatron-dist",
    "meg_": "megatron-legacy",
    "mx-": "mxnet",
    "peft": "peft",
}
# One process wrote these files, whatever the run's size.
CONSOLIDATED = ("full-state-dict", "huggingface", "lightning", "mxnet", "peft")


@cache
def good_cases(fixtures_dir: Path) -> list[tuple[str, str, dict[str, Any], str]]:
    """Fixture, README, what ``inspect --json`` says of it, and the path of its expected tensors."""
    return list(_good_cases(fixtures_dir))


def _good_cases(fixtures_dir: Path) -> Iterator[tuple[str, str, dict[str, Any], str]]:
    for case in json.loads((fixtures_dir / "cases.json").read_text()):
        if case["command"] != "convert" or case["expect"] != "values":
            continue
        fixture = fixtures_dir / case["fixture"]
        arguments = [text.replace("{F}", str(fixture)) for text in case.get("args") or []]
        named = dict(zip(arguments[::2], arguments[1::2], strict=True))
        config, base = named.get("--config"), named.get("--base-model")
        summary = inspect_checkpoint(
            fixture / case["path"],
            config_dir=None if config is None else Path(config),
            base_model=None if base is None else Path(base),
        )
        readme = (fixture / "README.md").read_text()
        yield case["fixture"], readme, summary.to_json(), str(fixture / case["expected"])


def test_layout_ranks_mesh_and_step_are_those_of_the_readme(fixtures_dir: Path, subtests: pytest.Subtests) -> None:
    for name, readme, found, _ in good_cases(fixtures_dir):
        with subtests.test(fixture=name, path=found["path"]):
            assert found["layout"] == next(layout for start, layout in LAYOUTS.items() if name.startswith(start))
            ranks = re.search(r"world size (\d+)", readme, re.IGNORECASE) or re.search(r"on (\d+) ranks", readme)
            grid = re.search(r"TP=(\d+) PP=(\d+)", readme)
            if grid:
                assert found["world_size"] == int(grid[1]) * int(grid[2])
                dims = {"tp": int(grid[1]), "pp": int(grid[2])}
                sizes = [size for size in dims.values() if size > 1] or [1]
                assert found["mesh"].startswith("×".join(map(str, sizes)))
            elif ranks:
                assert found["world_size"] == (1 if found["layout"] in CONSOLIDATED else int(ranks[1]))
            mesh = re.search(r"device_mesh \(([\d, ]+)\) names=\(([^)]*)\)", readme)
            if mesh:
                sizes_text = "×".join(re.findall(r"\d+", mesh[1]))
                names = ", ".join(re.findall(r"'(\w+)'", mesh[2]))
                assert found["mesh"] == f"{sizes_text} ({names})"
            step = re.search(r"(?:step-|step_|checkpoint-|iter_)0*(\d+)", found["path"])
            if step:
                assert found["global_step"] == int(step[1])
            steps = re.search(r"torch AdamW, (\d+) steps", readme)
            if steps and found["layout"] == "deepspeed":
                assert found["global_step"] == int(steps[1])


def test_tensors_and_parameters_are_those_of_the_expected_file(fixtures_dir: Path, subtests: pytest.Subtests) -> None:
    for name, readme, found, expected in good_cases(fixtures_dir):
        with subtests.test(fixture=name, path=found["path"]):
            written = re.search(r"(\d+)/\1 tensors bit-equal", readme)
            if written:
                assert found["tensor_count"] == int(written[1])
            kinds = re.search(r"value types in model_\*\.pt (\{.*?\})", readme)
            if kinds:
                saved = sum(int(number) for number in re.findall(r": (\d+)", kinds[1]))
                assert found["tensor_count"] + len(found["ties"]) == saved
            if found["adapter"] or found["layout"] == "lightning":
                continue  # factors, and a buffer of the wrapper, are not in the expected file
            with safe_open(expected, "pt") as file:
                shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
            ties = sum(alias in shapes for alias in found["ties"])
            assert found["tensor_count"] in (len(shapes) - ties, len(shapes) - ties + 1)
            cut = re.search(r"vocab (\d+), stored vocab rows (\d+)", readme)
            if cut and cut[1] != cut[2]:
                assert any(f"({cut[2]} → {cut[1]})" in note for note in found["notes"])


def test_what_is_no_weight_is_listed(fixtures_dir: Path, subtests: pytest.Subtests) -> None:
    for name, readme, found, _ in good_cases(fixtures_dir):
        with subtests.test(fixture=name, path=found["path"]):
            listed = " ".join(entry["name"] for entry in found["left_out"])
            said = readme.partition("Complete")[0]
            for file in re.findall(r"\b(?:random_states_\d+\.pkl|scheduler\.(?:bin|pt)|training_args\.bin)", said):
                assert file in listed
            if "'optim." in readme or "'optimizer." in readme:
                assert re.search(r"\boptim(izer)?\.\*", listed)
            if found["layout"] == "deepspeed" and "universal" not in name:
                assert "optimizer" in listed
            if "'optimizer'" in readme and found["layout"] == "fsdp":
                assert listed.count("optim_world_size") == found["world_size"]
            if "'hf_model'" in readme:
                assert "huggingface/model.safetensors" in listed
            if "Two tags in one folder" in readme:
                assert any("other tags" in note for note in found["notes"])
