"""Checkpoints of every layout while a trainer writes, renames and deletes them: never called complete before they are.

A writer that sees the directory's files in the order of their names, or in the opposite one, and each file in three
parts stands for all writers; the last file to be written decides.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptflow.convert import plan_conversion
from ckptflow.discovery.discover import FoundCheckpoint, discover
from ckptflow.errors import CkptflowError
from ckptflow.formats.base import ReadOptions
from ckptflow.formats.registry import check, locate, read
from fuzz_seeds import SEEDS, Seed
from fuzzing import request_of

# Trackers and configs are not part of the checkpoint: steps may be complete without them.
BESIDE = ("latest_checkpointed_iteration.txt", "config.json", "net-symbol.json", "fsdp_config.json")
PARTS = 3


def make(layout: str, root: Path) -> Seed:
    root.mkdir()
    seed = SEEDS[layout](root)
    if layout == "dcp_hf":  # nothing but the config tells whether another rank follows
        shutil.copy(seed.options["config_dir"] / "config.json", root)
    return seed


def weight_files(root: Path) -> list[Path]:
    files = sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return [
        file for file in files if file.name not in BESIDE and "base" not in file.parts and "config" not in file.parts
    ]


def growing(source: Path, target: Path, order: list[Path]) -> Iterator[bool]:
    """Copies a checkpoint file by file and part by part; says after each part whether all of it is there."""
    for file in (path.relative_to(source) for path in source.rglob("*") if path.is_file()):
        if file not in order:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / file, target / file)
    for number, file in enumerate(order, start=1):
        data = (source / file).read_bytes()
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        for part in range(PARTS + 1):
            (target / file).write_bytes(data[: len(data) * part // PARTS])
            yield number == len(order) and part == PARTS


def states(root: Path) -> list[FoundCheckpoint]:
    return [found for found in discover([root], settle_seconds=0) if found.location.path.name != "base"]


def is_whole(seed: Seed, root: Path, out: Path) -> bool:
    """Whether every tensor of the finished checkpoint can be planned; its values then are right or refused."""
    try:
        plan_conversion(request_of(root, seed, out))
    except CkptflowError:
        return False
    return True


@pytest.mark.parametrize("backwards", [False, True], ids=["in order", "backwards"])
@pytest.mark.parametrize("layout", SEEDS)
def test_a_growing_checkpoint_is_complete_only_with_its_last_part(tmp_path: Path, layout: str, backwards: bool) -> None:
    seed = make(layout, tmp_path / "source")
    order = weight_files(tmp_path / "source")
    order = order[::-1] if backwards else order
    target = tmp_path / "target"
    target.mkdir()
    for done in growing(tmp_path / "source", target, order):
        found = states(target)
        complete = [f for f in found if f.state == "complete"]
        if done:
            assert [f.state for f in found] == ["complete"]
        elif complete:
            # `latest`, an index or a tracker may be all that is missing: then all weights must be there.
            assert is_whole(seed, target, tmp_path / "out"), complete[0].reason


@pytest.mark.parametrize("layout", SEEDS)
def test_a_checkpoint_that_loses_any_file_is_not_complete_or_still_whole(tmp_path: Path, layout: str) -> None:
    seed = make(layout, tmp_path / "source")
    expected = read_names(tmp_path / "source", seed)
    for file in weight_files(tmp_path / "source"):
        shutil.rmtree(tmp_path / "target", ignore_errors=True)
        shutil.copytree(tmp_path / "source", tmp_path / "target")
        (tmp_path / "target" / file).unlink()
        for found in states(tmp_path / "target"):
            if found.state == "complete":
                assert read_names(tmp_path / "target", seed) == expected, file


def read_names(root: Path, seed: Seed) -> dict[str, tuple[int, ...]]:
    options = {k: root / v for k, v in seed.options.items() if k in ("config_dir", "base_model")}
    manifest = read(locate(root / seed.path), ReadOptions(**options))
    return {fqn: source.shape for fqn, source in manifest.tensors.items()}


@pytest.mark.parametrize("layout", SEEDS)
def test_a_checkpoint_under_a_staging_name_appears_with_its_rename(tmp_path: Path, layout: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    make(layout, run / "tmp-step_5")
    assert list(discover([run], settle_seconds=0)) == []
    (run / "tmp-step_5").rename(run / "step_5")
    assert {found.state for found in states(run / "step_5")} == {"complete"}
    (run / "step_5").rename(run / "step_5.deleting")
    assert list(discover([run], settle_seconds=0)) == []


@pytest.mark.parametrize("layout", SEEDS)
def test_a_rotation_that_deletes_file_by_file_never_raises(tmp_path: Path, layout: str) -> None:
    seed = make(layout, tmp_path / "step_5")
    location = locate(tmp_path / "step_5" / seed.path)
    for file in weight_files(tmp_path / "step_5"):
        (tmp_path / "step_5" / file).unlink()
        list(discover([tmp_path], settle_seconds=0))
        check(location)
    assert check(location).state != "complete"
    shutil.rmtree(tmp_path / "step_5")
    assert check(location).state != "complete"
    assert list(discover([tmp_path], settle_seconds=0)) == []


@pytest.mark.parametrize("layout", SEEDS)
def test_files_that_belong_to_others_are_no_crash(tmp_path: Path, layout: str) -> None:
    """A name that loops, a directory in place of a file: found and refused."""
    seed = make(layout, tmp_path / "step_5")
    location = locate(tmp_path / "step_5" / seed.path)
    first = tmp_path / "step_5" / weight_files(tmp_path / "step_5")[0]
    first.unlink()
    os.symlink(first.name, first)
    list(discover([tmp_path], settle_seconds=0))
    check(location)
    first.unlink()
    first.mkdir()
    list(discover([tmp_path], settle_seconds=0))
    check(location)
