"""``--overwrite`` replaces a model. It never costs a checkpoint, nor what somebody else keeps in the directory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fuzz_seeds
from checkpoints import write_fsdp_step
from ckptflow.cli.main import main
from ckptflow.convert import convert
from ckptflow.errors import OutputError
from ckptflow.files.locks import exclusive
from ckptflow.request import ConvertRequest
from ckptflow.seeding.request import SeedRequest
from ckptflow.seeding.seed import seed_model
from ckptflow_flows.workplace import Workplace
from directory_state import state_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_fsdp_step(tmp_path / "runs" / "my-run", 10)
    return tmp_path / "runs" / "my-run"


@pytest.fixture
def actor(run: Path) -> Path:
    return run / "global_step_10" / "actor"


@pytest.mark.parametrize(
    "out", ["..", ".", "global_step_10", "global_step_10/actor", "global_step_10/actor/huggingface"]
)
def test_what_the_model_is_made_of_is_never_replaced(run: Path, actor: Path, out: str) -> None:
    before = state_of(run)
    with pytest.raises(OutputError, match="what the model is made of"):
        convert(ConvertRequest(path=actor, out=run / out, overwrite=True))
    assert state_of(run) == before


def test_nor_is_it_through_a_link_or_from_a_config_elsewhere(run: Path, actor: Path, tmp_path: Path) -> None:
    shutil.move(actor / "huggingface", tmp_path / "config")
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "to-config").symlink_to(tmp_path / "config")
    before = state_of(tmp_path)
    for out in ("link", "config", "to-config"):
        with pytest.raises(OutputError, match="what the model is made of"):
            convert(ConvertRequest(path=actor, out=tmp_path / out, config_dir=tmp_path / "to-config", overwrite=True))
    assert state_of(tmp_path) == before


@pytest.mark.parametrize("seed", [fuzz_seeds.torch_dcp, fuzz_seeds.zero_2, fuzz_seeds.lightning, fuzz_seeds.fsdp])
def test_a_checkpoint_of_another_training_is_never_replaced(
    actor: Path, tmp_path: Path, seed: Callable[[Path], object]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    seed(other)
    before = state_of(other)
    with pytest.raises(OutputError, match="never replaces"):
        convert(ConvertRequest(path=actor, out=other, overwrite=True))
    assert state_of(other) == before


def test_nor_are_directories_that_no_model_has_and_the_one_that_a_person_works_in(
    actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    (out / "thesis").mkdir(parents=True)
    (out / "thesis" / "chapter-1.txt").write_text("years of work")
    with pytest.raises(OutputError, match="thesis: a directory that is not of a model"):
        convert(ConvertRequest(path=actor, out=out, overwrite=True))
    assert (out / "thesis" / "chapter-1.txt").read_text() == "years of work"
    shutil.rmtree(out / "thesis")
    (out / "notes.txt").write_text("of no use")
    monkeypatch.chdir(out)
    with pytest.raises(OutputError, match="where this command runs"):
        convert(ConvertRequest(path=actor, out=Path(), overwrite=True))
    monkeypatch.chdir(tmp_path)
    convert(ConvertRequest(path=actor, out=out, overwrite=True))
    assert not (out / "notes.txt").exists()


def test_a_model_of_somebody_else_is_replaced(actor: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    fuzz_seeds.hf_safetensors(tmp_path / "out")
    convert(ConvertRequest(path=actor, out=tmp_path / "out", overwrite=True))
    assert (tmp_path / "out" / "ckptflow.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "out"}


def test_a_config_is_not_replaced_by_the_model_that_is_drawn_from_it(actor: Path) -> None:
    config = actor / "huggingface"
    before = state_of(config)
    with pytest.raises(OutputError, match="what the model is made of"):
        seed_model(SeedRequest(config=str(config), out=config, overwrite=True))
    assert state_of(config) == before


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_as_out_leads_to_the_model(actor: Path, tmp_path: Path, is_there: bool) -> None:
    large_disk, link = tmp_path / "large-disk" / "model", tmp_path / "model"
    if is_there:
        large_disk.mkdir(parents=True)
    link.symlink_to(large_disk)
    convert(ConvertRequest(path=actor, out=link))
    assert link.is_symlink()
    assert (large_disk / "ckptflow.json").exists()
    assert os.listdir(large_disk.parent) == ["model"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "run", "", "--overwrite"],
        ["convert", "", "out"],
        ["shrink", ""],
        ["verify", ""],
        ["detect", ""],
        ["retain", "", "--keep", "1", "--to", "file:///nowhere"],
        ["seed-model", "", "out"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_an_empty_path_is_not_the_working_directory(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    # A variable of the shell that was not set.
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "is empty" in capsys.readouterr().err


def test_a_file_system_that_takes_no_files_is_told_at_once() -> None:
    with pytest.raises(OutputError, match="can't write here"), exclusive(Path("/proc/.model.ckptflow/lock")):
        pass


def test_a_lock_that_another_user_left_is_named() -> None:
    with tempfile.TemporaryDirectory() as name:
        lock = Path(name) / "shared" / ".my-run-step-10.lock"
        lock.parent.mkdir()
        for path, mode in ((lock.parent.parent, 0o755), (lock.parent, 0o777)):
            path.chmod(mode)
        lock.touch(mode=0o444)
        with as_nobody(), pytest.raises(OutputError, match="a lock is another user's") as raised, exclusive(lock):
            pass
    assert raised.value.file == str(lock)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may write everywhere; a test that is not run by root is nobody enough."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_run_clears_away_its_own_model_and_nothing_else(actor: Path, tmp_path: Path) -> None:
    place = Workplace(tmp_path / "work" / "my-run-step-10")
    place.out.mkdir(parents=True)
    (place.out / "thesis.txt").write_text("years of work")
    place.lock.touch()
    place.tidy(keep=False)
    assert (place.out / "thesis.txt").exists()
    (place.out / "thesis.txt").unlink()
    convert(ConvertRequest(path=actor, out=place.out))
    place.lock.touch()
    place.tidy(keep=False)
    assert not place.out.exists()


def test_a_link_that_leads_nowhere_is_no_place_for_a_model(actor: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="OUT is no directory"):
            convert(ConvertRequest(path=actor, out=tmp_path / "loop", overwrite=overwrite))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loop", "runs"]


def test_a_mount_point_is_refused_before_the_work(actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "volume"
    out.mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: path == out)
    with pytest.raises(OutputError, match="mount point"):
        convert(ConvertRequest(path=actor, out=out, overwrite=True))
    assert list(out.iterdir()) == []
    assert not (tmp_path / ".volume.ckptflow").exists()


def test_a_work_directory_that_is_a_link_costs_nothing_that_it_leads_to(actor: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "directory").mkdir(parents=True)
    (theirs / "file").write_text("theirs")
    (tmp_path / ".out.ckptflow").symlink_to(theirs)
    with pytest.raises(OutputError, match="work directory is a link"):
        convert(ConvertRequest(path=actor, out=tmp_path / "out"))
    assert {"directory", "file"} <= {path.name for path in theirs.iterdir()}
