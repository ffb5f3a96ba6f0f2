"""What only a directory can do wrong: leftovers of dead runs, the model's own directory, no room."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptflow.errors import PermanentPublishError, TransientPublishError, UsageError
from ckptflow.publish import upload
from ckptflow.publish.local import _create_locked
from ckptflow.publish.mounts import check_mounted
from publishing import contents_of, write_model


def test_temporary_files_of_dead_runs_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    living_fd, living_path = _create_locked(place)
    dead = "from ckptflow.publish.local import _create_locked; from pathlib import Path; import os, sys, signal;"
    dead += "print(_create_locked(Path(sys.argv[1]))[1], flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    killed = subprocess.run([sys.executable, "-c", dead, str(place)], stdout=subprocess.PIPE, text=True, check=False)
    dead_path = Path(killed.stdout.strip())
    assert dead_path.exists()
    model = write_model(tmp_path / "out")
    upload(model, place.as_uri())
    assert living_path.exists()
    assert not dead_path.exists()
    os.close(living_fd)
    assert {name: content for name, content in contents_of(place).items() if name != living_path.name} == contents_of(
        model
    )


def test_the_model_directory_is_no_destination_for_itself(tmp_path: Path) -> None:
    model = write_model(tmp_path / "out")
    with pytest.raises(UsageError, match="itself"):
        upload(model, model.as_uri())


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(PermanentPublishError, match="can't write there"):
        upload(write_model(tmp_path / "out"), (tmp_path / "file").as_uri())


def test_what_belongs_on_a_file_system_that_is_not_mounted_is_not_written_on_the_disk_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount, table = tmp_path / "model store", tmp_path / "fstab"
    mount.mkdir()
    escaped = str(mount).replace(" ", r"\040")
    table.write_text(f"# of this machine\nLABEL=root / ext4 defaults 0 1\nnas:/m {escaped} nfs defaults 0 0\n")
    monkeypatch.setattr("ckptflow.publish.mounts.FSTAB", table)
    model = write_model(tmp_path / "out")
    with pytest.raises(TransientPublishError, match="is not mounted") as caught:
        upload(model, (mount / "models").as_uri())
    assert f"mount {mount}" in str(caught.value)
    assert list(mount.iterdir()) == []
    upload(model, (tmp_path / "elsewhere").as_uri())
    table.write_text("proc /proc proc defaults 0 0\n")
    check_mounted(Path("/proc/self"))


def test_a_full_disk_says_so_and_leaves_nothing_half(tmp_path: Path) -> None:
    model = write_model(tmp_path / "out")
    place = tmp_path / "place"
    # A limit on file sizes is the one shortage that needs no rights and no file system of its own.
    script = (
        "import resource, signal, sys; from pathlib import Path; from ckptflow.publish import upload;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, 250_000));"
        "upload(Path(sys.argv[1]), sys.argv[2])"
    )
    command = [sys.executable, "-c", script, str(model), place.as_uri()]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert "PermanentPublishError" in ended.stderr
    assert "File too large" in ended.stderr
    assert "what to do: raise the limit on the size of a file" in ended.stderr
    assert contents_of(place) == {}


def test_a_directory_inside_of_the_model_is_no_destination(tmp_path: Path) -> None:
    model = write_model(tmp_path / "out")
    before = contents_of(model)
    (tmp_path / "link").symlink_to(model)
    for place in (model / "copy", tmp_path / "link" / "copy"):
        with pytest.raises(UsageError, match="or lies in it"):
            upload(model, place.as_uri())
    assert contents_of(model) == before
