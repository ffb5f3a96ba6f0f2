"""Questions to transformers about a config or a model, each answered by a process of its own.

The import of transformers takes seconds and hundreds of megabytes, and a config from outside may describe a model of
absurd size. Nothing is downloaded, and no code from the directory is run. Processes are forked from one that has
imported transformers (``askserver``); it ends a minute after the last question, or with the process that asks.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from ckptflow.errors import CkptflowError

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "critical",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}

PYTHON = (sys.executable, "-P", "-m")
"""Without -P modules would be imported from the working directory, which may be that of a checkpoint."""

IDLE_SECONDS = 60.0

ADDRESS_VARIABLE = "CKPTFLOW_ASK_SOCKET"
"""Names the socket of a server that another process started for this one."""


def ask(
    module: str, config_dir: Path, question: str, timeout_seconds: float, failure: type[CkptflowError]
) -> dict[str, Any]:
    """The answer of ``python -P -m module config_dir``.

    Args:
        module: reads the question from stdin and prints its answer as the last line of stdout, in JSON.
        config_dir: directory with config.json.
        question: JSON.
        timeout_seconds: most wall time.
        failure: what is raised where there is no answer.
    """
    try:
        done = run_module(module, config_dir, question, timeout_seconds)
    except TimeoutError as error:
        raise failure(
            "transformers could not describe the model in time", file=config_dir, expected=f"{timeout_seconds} s"
        ) from error
    if done.returncode != 0:
        raise failure("transformers could not describe the model", file=config_dir, found=done.stderr.strip()[-2000:])
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A process that has ended: its exit status, negative for a signal, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def run_module(module: str, argument: Path, question: str, timeout_seconds: float) -> Ended:
    """``python -P -m module argument`` with transformers imported, offline and without a GPU.

    Args:
        module: one of this package.
        argument: its only one; a path.
        question: its stdin.
        timeout_seconds: most wall time; then it is killed.

    Raises:
        TimeoutError: it was.
    """
    message = {"module": module, "argument": os.path.abspath(argument)}
    deadline = time.monotonic() + timeout_seconds
    with _files(question) as files:
        shared = os.environ.get(ADDRESS_VARIABLE)
        returncode = None if shared is None else _asked(shared, message, files, deadline)
        if returncode is None:
            returncode = _asked(_own_address(), message, files, deadline)
        if returncode is None:
            returncode = _started(message, files, deadline)
        stdout, stderr = (_text(file) for file in files[1:])
    return Ended(returncode=returncode, stdout=stdout, stderr=stderr)


@contextlib.contextmanager
def _files(question: str) -> Iterator[tuple[IO[bytes], IO[bytes], IO[bytes]]]:
    """Stdin, stdout and stderr of a process; files hold any amount without a reader."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        stdin.write(question.encode())
        stdin.seek(0)
        yield stdin, stdout, stderr


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _asked(address: str, message: dict[str, str], files: tuple[IO[bytes], ...], deadline: float) -> int | None:
    """The exit status from the server at that address; None where it has ended instead."""
    with socket.socket(socket.AF_UNIX) as asker, contextlib.suppress(FileNotFoundError, ConnectionError):
        asker.settimeout(_seconds_until(deadline))
        asker.connect(address)
        socket.send_fds(asker, [json.dumps(message).encode() + b"\n"], [file.fileno() for file in files])
        answer = asker.recv(64)
        return int(answer) if answer else None
    return None


def _seconds_until(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _started(message: dict[str, str], files: tuple[IO[bytes], ...], deadline: float) -> int:
    """The exit status of a new interpreter."""
    files[0].seek(0)
    for file in files[1:]:
        file.seek(0)
        file.truncate()
    stdin, stdout, stderr = files
    try:
        return subprocess.run(
            [*PYTHON, message["module"], message["argument"]],
            cwd="/",
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            timeout=_seconds_until(deadline),
            env={**os.environ, **OFFLINE},
            check=False,
        ).returncode
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(str(error)) from error


class Server:
    """A server of questions, which is there as long as this object is, or for a while after the last question.

    Attributes:
        address: path of its socket, in a directory that only this user may open.
    """

    def __init__(self, idle_seconds: float = IDLE_SECONDS) -> None:
        self._directory = tempfile.mkdtemp(prefix="ckptflow-ask-")
        self.address = os.path.join(self._directory, "socket")
        self._owner = os.getpid()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self.address)
            listening.listen()
            self.process = subprocess.Popen(
                [*PYTHON, "ckptflow.processes.askserver", str(listening.fileno()), str(idle_seconds)],
                cwd="/",
                stdin=subprocess.PIPE,  # closed when this process ends, however it does
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **OFFLINE},
                pass_fds=[listening.fileno()],
                start_new_session=True,  # Ctrl-C is for who asks
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def environment(self) -> dict[str, str]:
        """With which other processes ask this server."""
        return {ADDRESS_VARIABLE: self.address}

    def is_there(self) -> bool:
        """Whether it can be asked, as far as this process knows."""
        return self._owner == os.getpid() and self.process.poll() is None

    def stop(self) -> None:
        """End it; questions that are asked get no answer. Does nothing in a process that was forked."""
        if self._owner != os.getpid():
            return
        self.process.kill()
        self.process.communicate()
        shutil.rmtree(self._directory, ignore_errors=True)


_lock = threading.Lock()
_own: Server | None = None


def _own_address() -> str:
    """The address of this process's server, which is started where there is none."""
    global _own
    with _lock:
        if _own is None or not _own.is_there():
            _stop_own()
            _own = Server()
        return _own.address


@atexit.register
def _stop_own() -> None:
    if _own is not None:
        _own.stop()
