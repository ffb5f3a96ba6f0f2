"""Shrinking in place: atomic, careful with what belongs to the file, and honest about what it left alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptflow.cli.main import main
from ckptflow.errors import IncompleteCheckpointError, UnsupportedCheckpointError, UsageError
from ckptflow.formats.base import ReadOptions
from ckptflow.formats.registry import locate, read
from ckptflow.shrink import candidate_bytes, plan_shrink, shrink_tree
from ckptflow.shrink.guard import incomplete_steps
from deepspeed_writer import parameters, write_zero2
from retained import seen_by_nobody

torch = pytest.importorskip("torch")

SHRINK = "import sys; from ckptflow.shrink import shrink_tree; shrink_tree(sys.argv[1])"


def save_bloated(path: Path, *, numel: int = 20_000, used: int = 50) -> object:
    """A file of which most bytes are of no use; gives what torch loads from it."""
    base = torch.arange(numel, dtype=torch.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"w": base[100 : 100 + used], "step": 3}, path)
    return base[100 : 100 + used]


def outcomes(report: object) -> dict[str, str]:
    """File name → outcome."""
    return {Path(file.path).name: file.outcome for file in report.files}


class TestWhatBelongsToTheFile:
    def test_mode_times_and_attributes_stay(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt"
        save_bloated(path)
        path.chmod(0o640)
        os.utime(path, ns=(1_600_000_000_123_456_789, 1_500_000_000_987_654_321))
        attributes = {}
        try:
            os.setxattr(path, "user.origin", b"run 7")
            attributes = {"user.origin": b"run 7"}
        except OSError:
            pass  # this file system has none
        before = path.stat()
        shrink_tree(path)
        after = path.stat()
        assert after.st_ino != before.st_ino
        assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
        assert after.st_atime_ns == before.st_atime_ns
        assert {name: os.getxattr(path, name) for name in attributes} == attributes

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
    def test_the_owner_stays(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt"
        save_bloated(path)
        os.chown(path, 1234, 2345)
        shrink_tree(path)
        assert (path.stat().st_uid, path.stat().st_gid) == (1234, 2345)

    def test_a_file_with_nothing_to_gain_is_not_touched(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt"
        torch.save({"w": torch.arange(1_000.0)}, path)
        before = path.stat()
        (file,) = shrink_tree(path).files
        after = path.stat()
        assert (file.outcome, file.saved_bytes) == ("unchanged", 0)
        assert (after.st_ino, after.st_mtime_ns, after.st_ctime_ns) == (
            before.st_ino,
            before.st_mtime_ns,
            before.st_ctime_ns,
        )

    def test_a_second_run_has_nothing_to_do(self, tmp_path: Path) -> None:
        save_bloated(tmp_path / "model.pt")
        assert outcomes(shrink_tree(tmp_path)) == {"model.pt": "shrunk"}
        before = (tmp_path / "model.pt").stat().st_ino
        assert outcomes(shrink_tree(tmp_path)) == {"model.pt": "unchanged"}
        assert (tmp_path / "model.pt").stat().st_ino == before

    def test_hard_links_are_not_parted(self, tmp_path: Path) -> None:
        save_bloated(tmp_path / "model.pt")
        os.link(tmp_path / "model.pt", tmp_path / "kept.pt")
        report = shrink_tree(tmp_path)
        assert outcomes(report) == {"kept.pt": "skipped", "model.pt": "skipped"}
        assert "2 hard links" in str(report.files[0].reason)
        assert (tmp_path / "model.pt").samefile(tmp_path / "kept.pt")

    def test_links_are_not_followed_out_of_the_tree(self, tmp_path: Path) -> None:
        save_bloated(tmp_path / "outside" / "model.pt")
        inside = tmp_path / "inside"
        inside.mkdir()
        (inside / "file.pt").symlink_to(tmp_path / "outside" / "model.pt")
        (inside / "directory").symlink_to(tmp_path / "outside")
        before = (tmp_path / "outside" / "model.pt").read_bytes()
        assert shrink_tree(inside).files == ()
        assert (tmp_path / "outside" / "model.pt").read_bytes() == before

    def test_a_link_that_is_named_leads_to_its_file_and_stays_a_link(self, tmp_path: Path) -> None:
        save_bloated(tmp_path / "data" / "model.pt")
        (tmp_path / "link.pt").symlink_to(tmp_path / "data" / "model.pt")
        assert outcomes(shrink_tree(tmp_path / "link.pt")) == {"model.pt": "shrunk"}
        assert (tmp_path / "link.pt").is_symlink()


class TestWhichFiles:
    def test_patterns_choose_by_name_or_by_path(self, tmp_path: Path) -> None:
        for name in ("a.pt", "b.pth", "c.bin", "d.ckpt", "e.tar", "sub/f.pt", "sub/deep/g.bin"):
            save_bloated(tmp_path / name)
        dry = shrink_tree(tmp_path, dry_run=True)
        assert list(outcomes(dry)) == ["a.pt", "b.pth", "c.bin", "d.ckpt", "g.bin", "f.pt"]
        assert list(outcomes(shrink_tree(tmp_path, ["*.tar", "sub/*.bin"], dry_run=True))) == ["e.tar", "g.bin"]
        assert list(outcomes(shrink_tree(tmp_path / "e.tar", dry_run=True))) == ["e.tar"]
        assert shrink_tree(tmp_path / "e.tar", ["*.pt"], dry_run=True).files == ()

    def test_a_dry_run_tells_the_exact_sizes_and_writes_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt"
        save_bloated(path)
        before = path.read_bytes()
        dry = shrink_tree(tmp_path, dry_run=True)
        assert path.read_bytes() == before
        assert outcomes(dry) == {"model.pt": "would-shrink"}
        done = shrink_tree(tmp_path)
        assert (dry.before_bytes, dry.after_bytes) == (done.before_bytes, done.after_bytes)
        assert done.after_bytes == path.stat().st_size
        assert plan_shrink(path).saved_bytes == 0

    @pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
    def test_files_of_other_kinds_are_skipped_by_name(self, tmp_path: Path) -> None:
        (tmp_path / "vocabulary.bin").write_bytes(b"\x01\x02\x03 words")
        torch.jit.save(torch.jit.script(torch.nn.ReLU()), tmp_path / "program.pt")
        report = shrink_tree(tmp_path)
        assert outcomes(report) == {"program.pt": "skipped", "vocabulary.bin": "skipped"}
        assert "TorchScript" in str(report.files[0].reason)
        assert report.failures == ()

    def test_files_that_an_index_points_into_are_never_shrunk(self, tmp_path: Path) -> None:
        save_bloated(tmp_path / "__0_0.distcp")
        assert outcomes(shrink_tree(tmp_path, ["*"])) == {"__0_0.distcp": "skipped"}

    def test_names_that_writers_use_while_they_are_at_work_are_left_alone(self, tmp_path: Path) -> None:
        for name in ("tmp-checkpoint-5/model.pt", ".hidden.pt", "tmp_model.pt"):
            save_bloated(tmp_path / name)
        assert shrink_tree(tmp_path).files == ()

    def test_one_damaged_file_does_not_keep_the_others_from_being_shrunk(self, tmp_path: Path) -> None:
        for name in ("a.pt", "b.pt", "c.pt"):
            save_bloated(tmp_path / name)
        whole = (tmp_path / "b.pt").read_bytes()
        (tmp_path / "b.pt").write_bytes(whole[:-100])
        report = shrink_tree(tmp_path)
        assert outcomes(report) == {"a.pt": "shrunk", "b.pt": "failed", "c.pt": "shrunk"}
        assert [Path(file.path).name for file in report.failures] == ["b.pt"]
        assert (tmp_path / "b.pt").read_bytes() == whole[:-100]

    @pytest.mark.parametrize("place", [0.2, 0.9])
    def test_damage_in_what_would_be_dropped_is_found_and_not_covered_up(self, tmp_path: Path, place: float) -> None:
        path = tmp_path / "model.pt"
        save_bloated(path)
        content = bytearray(path.read_bytes())
        content[int(len(content) * place)] ^= 1
        path.write_bytes(content)
        (file,) = shrink_tree(path).files
        assert file.outcome == "failed"
        assert "checksum" in str(file.reason)
        assert path.read_bytes() == content

    def test_code_in_a_pickle_is_refused_and_not_run(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt"
        save_bloated(path)
        evil = b"\x80\x02cos\nsystem\nX\x11\x00\x00\x00touch /tmp/pwned-7\x85R."
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "evil.pt", "w") as new:
            for name in old.namelist():
                new.writestr(name, evil if name.endswith("data.pkl") else old.read(name))
        assert outcomes(shrink_tree(tmp_path / "evil.pt")) == {"evil.pt": "failed"}
        assert not Path("/tmp/pwned-7").exists()

    def test_a_path_that_does_not_exist_is_a_wrong_request(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="no such file"):
            shrink_tree(tmp_path / "missing")


class TestUnfinishedSteps:
    def save_step(self, run: Path, ranks: tuple[int, ...]) -> Path:
        """Files of a step of FSDP ranks, as verl lays them out."""
        actor = run / "global_step_10" / "actor"
        for rank in ranks:
            save_bloated(actor / f"model_world_size_2_rank_{rank}.pt")
        save_bloated(run / "other.pt")
        return actor

    def test_a_step_that_lacks_a_rank_is_refused(self, tmp_path: Path) -> None:
        actor = self.save_step(tmp_path, ranks=(0,))
        for path in (actor, actor.parent, actor / "model_world_size_2_rank_0.pt"):
            before = (actor / "model_world_size_2_rank_0.pt").read_bytes()
            with pytest.raises(IncompleteCheckpointError, match="never shrunk"):
                shrink_tree(path)
            assert (actor / "model_world_size_2_rank_0.pt").read_bytes() == before

    def test_a_run_with_an_unfinished_step_is_shrunk_but_for_that_step(self, tmp_path: Path) -> None:
        actor = self.save_step(tmp_path, ranks=(0,))
        before = (actor / "model_world_size_2_rank_0.pt").read_bytes()
        report = shrink_tree(tmp_path)
        assert outcomes(report) == {"global_step_10": "refused", "other.pt": "shrunk"}
        assert len(report.failures) == 1
        assert (actor / "model_world_size_2_rank_0.pt").read_bytes() == before

    def test_a_whole_step_that_can_not_be_merged_is_shrunk(self, tmp_path: Path) -> None:
        config = {"zero_optimization": {"stage": 2, "mics_shard_size": 2}}
        bloat = torch.zeros(100_000)[:1]
        folder = write_zero2(tmp_path, [parameters({"w": (4, 4)})], 2, model={"ds_config": config, "bloat": bloat})
        with pytest.raises(UnsupportedCheckpointError, match="MiCS"):
            read(locate(folder), ReadOptions())
        assert outcomes(shrink_tree(tmp_path))["mp_rank_00_model_states.pt"] == "shrunk"

    def test_layer_files_without_a_step_are_a_bag_of_files(self, tmp_path: Path) -> None:
        folder = Path(tempfile.mkdtemp(dir=tmp_path)) / "layers"
        save_bloated(folder / "layer_01-model_00-model_states.pt")
        assert list(outcomes(shrink_tree(folder)).values()) == ["shrunk"]


class TestTrouble:
    def test_a_file_that_its_writer_touches_meanwhile_is_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt"
        save_bloated(path, used=5_000)

        def append(count: int) -> None:
            with open(path, "ab") as file:
                file.write(b"more")

        (file,) = shrink_tree(path, progress=append).files
        assert file.outcome == "failed"
        assert "changed while it was read" in str(file.reason)
        assert path.read_bytes().endswith(b"more")
        assert os.listdir(tmp_path) == ["model.pt"]

    def test_a_file_that_is_replaced_meanwhile_stays_the_new_one(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt"
        save_bloated(path, used=5_000)
        torch.save({"w": torch.ones(3)}, tmp_path / "newer")
        newer = (tmp_path / "newer").read_bytes()

        def replace(count: int) -> None:
            if (tmp_path / "newer").exists():
                os.replace(tmp_path / "newer", path)

        assert outcomes(shrink_tree(path, progress=replace)) == {"model.pt": "failed"}
        assert path.read_bytes() == newer

    def test_a_file_that_its_trainer_deletes_meanwhile_stays_deleted(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt"
        save_bloated(path, used=5_000)
        report = shrink_tree(path, progress=lambda count: path.unlink(missing_ok=True))
        assert outcomes(report) == {"model.pt": "failed"}
        assert os.listdir(tmp_path) == []

    def test_what_a_killed_run_left_is_removed(self, tmp_path: Path) -> None:
        save_bloated(tmp_path / "model.pt")
        (tmp_path / ".model.pt.ckptflow-shrink").write_bytes(b"half of a file" * 10_000)
        (tmp_path / ".deleted.pt.ckptflow-shrink").write_bytes(b"half of a file")
        assert outcomes(shrink_tree(tmp_path)) == {"model.pt": "shrunk"}
        assert os.listdir(tmp_path) == ["model.pt"]

    def test_two_runs_at_once_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        values = {f"{index}.pt": save_bloated(tmp_path / f"{index}.pt") for index in range(40)}
        command = [sys.executable, "-c", SHRINK, str(tmp_path)]
        runs = [subprocess.Popen(command) for _ in range(2)]
        assert [run.wait(60) for run in runs] == [0, 0]
        assert sorted(os.listdir(tmp_path)) == sorted(values)
        for name, value in values.items():
            assert torch.load(tmp_path / name, weights_only=True)["w"].equal(value)
            assert (tmp_path / name).stat().st_size < 3_000

    def test_after_a_kill_at_any_time_each_file_is_the_old_or_the_new_one(self, tmp_path: Path) -> None:
        names = [f"{index}.pt" for index in range(6)]
        for name in names:
            value = save_bloated(tmp_path / "fresh" / name, numel=2_000_000, used=1_000_000)
        old = (tmp_path / "fresh" / "0.pt").stat().st_size
        seen: set[str] = set()
        for attempt in range(9):
            work = tmp_path / f"work{attempt}"
            shutil.copytree(tmp_path / "fresh", work)
            seen |= self.kill_a_run(work, seconds=attempt * 0.008)
            for name in names:
                path = work / name
                assert torch.load(path, weights_only=True)["w"].equal(value)
                seen.add("old" if path.stat().st_size == old else "new")
            assert set(outcomes(shrink_tree(work)).values()) <= {"shrunk", "unchanged"}
            assert sorted(os.listdir(work)) == names
            shutil.rmtree(work)
        assert seen >= {"old", "new", "half"}

    def kill_a_run(self, work: Path, seconds: float) -> set[str]:
        """Kills a run so long after it began to write; says whether it left half a file."""
        run = subprocess.Popen([sys.executable, "-c", SHRINK, str(work)])
        deadline = time.monotonic() + 30
        while run.poll() is None and time.monotonic() < deadline and not list(work.glob(".*.ckptflow-shrink")):
            time.sleep(0.0005)
        time.sleep(seconds)
        run.send_signal(signal.SIGKILL)
        run.wait(30)
        return {"half"} if list(work.glob(".*.ckptflow-shrink")) else set()

    def test_where_the_disk_is_full_the_original_stays(self, small_disk: Path) -> None:
        path = small_disk / "model.pt"
        value = save_bloated(path, numel=500_000, used=300_000)
        save_bloated(small_disk / "small.pt", numel=5_000)
        report = shrink_tree(small_disk)
        assert outcomes(report) == {"model.pt": "failed", "small.pt": "shrunk"}
        assert "no room" in str(report.files[0].reason)
        assert sorted(os.listdir(small_disk)) == ["model.pt", "small.pt"]
        assert torch.load(path, weights_only=True)["w"].equal(value)

    def test_where_files_may_not_grow_that_large_the_original_stays(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt"
        value = save_bloated(path, numel=500_000, used=300_000)
        code = (
            "import resource, sys; from ckptflow.cli.main import main;"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000)); sys.exit(main(['shrink', sys.argv[1]]))"
        )
        run = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
        assert run.returncode == 1
        assert "no room" in run.stderr
        assert os.listdir(tmp_path) == ["model.pt"]
        assert torch.load(path, weights_only=True)["w"].equal(value)

    def test_memory_does_not_grow_with_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt"
        base = torch.zeros(75_000_000)
        torch.save({"a": base[1_000:37_000_000], "b": base[40_000_000:]}, path)
        assert path.stat().st_size > 300_000_000
        # Not getrusage: its maximum takes in the process that forked this one.
        code = f"{SHRINK}; print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
        run = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120)
        assert path.stat().st_size < 290_000_000, run.stderr
        assert int(run.stdout.split()[1]) < 100_000, "in KiB, the interpreter with it"


class TestCommand:
    def test_json_says_what_became_of_each_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        save_bloated(tmp_path / "a.pt")
        torch.save({"w": torch.ones(3)}, tmp_path / "b.pt")
        assert main(["shrink", str(tmp_path), "--json", "--dry-run"]) == 0
        dry = json.loads(capsys.readouterr().out)
        assert main(["shrink", str(tmp_path), "--json"]) == 0
        done = json.loads(capsys.readouterr().out)
        assert [file["outcome"] for file in dry["files"]] == ["would-shrink", "unchanged"]
        assert [file["outcome"] for file in done["files"]] == ["shrunk", "unchanged"]
        assert (dry["dry_run"], done["dry_run"]) == (True, False)
        assert dry["saved_bytes"] == done["saved_bytes"] == done["before_bytes"] - done["after_bytes"]
        assert done["after_bytes"] == sum(path.stat().st_size for path in tmp_path.iterdir())

    def test_people_get_bytes_per_file_and_in_total(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        save_bloated(tmp_path / "a.pt")
        before = (tmp_path / "a.pt").stat().st_size
        assert main(["shrink", str(tmp_path), "--pattern", "*.pt"]) == 0
        after = (tmp_path / "a.pt").stat().st_size
        out = capsys.readouterr().out
        assert f"a.pt: {before:,} -> {after:,} bytes, {before - after:,} saved" in out
        assert "1 of 1 files were shrunk" in out

    def test_a_damaged_file_among_others_ends_in_exit_status_1(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save_bloated(tmp_path / "a.pt")
        (tmp_path / "b.pt").write_bytes(b"PK\x03\x04 and no more")
        assert main(["shrink", str(tmp_path)]) == 1
        captured = capsys.readouterr()
        assert "a.pt: " in captured.out
        assert "b.pt: failed: the file is truncated" in captured.err

    def test_progress_adds_up_to_the_size_of_all_files(self, tmp_path: Path) -> None:
        save_bloated(tmp_path / "a.pt")
        (tmp_path / "b.pt").write_bytes(b"PK\x03\x04 and no more")
        total, counts = candidate_bytes(tmp_path), []
        shrink_tree(tmp_path, progress=counts.append)
        assert sum(counts) == total


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB; skips where none can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no rights to mount a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_what_a_trainer_deletes_meanwhile_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/gone.pt", "b/gone/gone.pt", "c/here.pt"):
        (tmp_path / name).parent.mkdir(parents=True)
        save_bloated(tmp_path / name)

    def guard(path: Path) -> dict[Path, str]:
        (tmp_path / "a" / "gone.pt").unlink()
        shutil.rmtree(tmp_path / "b")
        return incomplete_steps(path)

    monkeypatch.setattr("ckptflow.shrink.tree.incomplete_steps", guard)
    report = shrink_tree(tmp_path)
    assert [file.outcome for file in report.files] == ["skipped", "skipped", "shrunk"]
    assert {file.reason for file in report.files[:2]} == {"deleted meanwhile"}
    assert report.failures == ()


def test_a_directory_of_somebody_else_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        save_bloated(tmp_path / name / "a.pt")
    (tmp_path / "theirs").chmod(0)
    with seen_by_nobody(tmp_path):
        assert outcomes(shrink_tree(tmp_path, dry_run=True)) == {"a.pt": "would-shrink"}
        assert (tmp_path / "theirs") in {record.args[0] for record in caplog.records if isinstance(record.args, tuple)}
        with pytest.raises(PermissionError):
            shrink_tree(tmp_path / "theirs", dry_run=True)
