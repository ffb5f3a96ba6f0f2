"""``ckptflow convert`` killed at every change of a file, and run again: the model is whole, or it is not there.

The judge is ``ckpt-chaos``, which knows nothing of ckptflow: it kills the command at each open for writing, rename,
directory and removal below the output, runs it again and compares with a run that was left in peace.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import write_fsdp_step
from ckptflow.convert import convert
from ckptflow.request import ConvertRequest

SUPPORT = Path(__file__).resolve().parent / "support"
TWO_FILES = 50_000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """70 kB of bf16 output."""
    return write_fsdp_step(tmp_path_factory.mktemp("runs") / "chaos")


@pytest.mark.parametrize(
    ("mode", "least_points", "most_points"),
    [
        pytest.param("before", 30, 200, id="killed"),
        pytest.param("torn", 7, 200, id="killed with half of the file written"),
        pytest.param("unsynced", 30, 200, id="killed with all unsynced writes lost"),
        pytest.param("term", 8, 8, id="told to end, then killed"),
    ],
)
def test_a_conversion_that_is_killed_at_any_change_of_a_file_is_made_whole_by_the_next(
    checkpoint: Path, tmp_path: Path, mode: str, least_points: int, most_points: int
) -> None:
    convert_command = [sys.executable, "-m", "ckptflow.cli", "convert", str(checkpoint), "{out}/model"]
    command = [
        *(sys.executable, "-m", "ckpt_chaos", "run", "--modes", mode, "--max-points", str(most_points)),
        *("--jobs", "2", "--timeout", "60", "--work", str(tmp_path / "chaos")),
        *("--fail-on", "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL"),
        *("--result-cmd", shlex.join([sys.executable, str(SUPPORT / "directory_state.py"), "{out}"]), "--"),
        *(*convert_command, "--max-shard-size", f"{TWO_FILES}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    points = re.findall(r"^#\d+ \S+ \[\w+\].*$", done.stdout, re.MULTILINE)
    assert len(points) >= least_points, done.stdout
    assert [line for line in points if not line.rstrip().endswith("PASS")] == []


def test_the_judge_sees_through_a_converter_that_renames_too_early(tmp_path: Path) -> None:
    """The judge itself, on a program with the fault: its name appears before its bytes are synced."""
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import os, sys; out = sys.argv[1]; os.makedirs(out, exist_ok=True)\n"
        "if not os.path.exists(f'{out}/model'):\n"
        "    open(f'{out}/part', 'w').write('weights'); os.replace(f'{out}/part', f'{out}/model')\n"
        "open(f'{out}/done', 'w').close()\n"
    )
    state = shlex.join([sys.executable, str(SUPPORT / "directory_state.py"), "{out}"])
    command = [sys.executable, "-m", "ckpt_chaos", "run", "--modes", "unsynced", "--work", str(tmp_path / "chaos")]
    command += ["--result-cmd", state, "--", sys.executable, str(bad), "{out}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode != 0
    assert "SILENT_DIVERGENCE" in done.stdout


class DiskLog:
    """What reached the disk and in which order: wraps the calls with which files are written, synced and named."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: set[int] = set()
        self.named: list[tuple[str, bool]] = []
        self.unsynced_names: dict[str, list[str]] = {}
        for name, wrap in (
            ("pwrite", self._dirties),
            ("ftruncate", self._dirties),
            ("fsync", self._syncs),
            ("replace", self._names),
            ("rename", self._names),
        ):
            monkeypatch.setattr(os, name, wrap(getattr(os, name)))

    def _dirties(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(descriptor: int, *arguments: Any) -> Any:
            self.synced.discard(os.fstat(descriptor).st_ino)
            return call(descriptor, *arguments)

        return wrapped

    def _syncs(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(descriptor: int) -> None:
            call(descriptor)
            self.synced.add(os.fstat(descriptor).st_ino)
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            self.unsynced_names.pop(path, None)

        return wrapped

    def _names(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(source: Path, target: Path) -> None:
            files = [path for path in Path(source).rglob("*") if path.is_file()] or [Path(source)]
            is_safe = all(path.stat().st_ino in self.synced for path in files)
            # What is named now may rest on names that were given before: those must be on the disk.
            is_safe = is_safe and not any(names for names in self.unsynced_names.values())
            self.named.append((Path(target).name, is_safe))
            call(source, target)
            self.unsynced_names.setdefault(str(Path(target).parent), []).append(Path(target).name)

        return wrapped


def test_each_name_is_given_after_its_bytes_and_all_earlier_names_are_on_the_disk(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = DiskLog(monkeypatch)
    convert(ConvertRequest(path=checkpoint, out=tmp_path / "model", max_shard_bytes=TWO_FILES))
    names = [name for name, _ in log.named]
    weights = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert names[:4] == [weights[0], f"{weights[0]}.json", weights[1], f"{weights[1]}.json"]
    assert names[-2:] == ["ckptflow.json", "model"]
    assert [name for name, is_safe in log.named if not is_safe] == []
    assert log.unsynced_names == {}, "the last name is on the disk when convert returns"
