"""``python -m ckptflow.processes.askserver``: imports transformers once, then forks a process for each question.

The import takes seconds, an answer takes tenths of one. Each question still has a process of its own, with its own
limits and its own end: ``python -P -m MODULE ARGUMENT`` in all but the time that it takes to begin. Started and asked
by ``askprocess``; this process runs no thread and no tensor, which is what makes a fork of it safe.

A question comes over the socket as one line of JSON (module, argument) with three open files: its stdin,
stdout and stderr. The answer is one line with the exit status, negative for a signal. Whoever asks and hangs up ends
the process that works for him.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

MESSAGE_BYTES = 65536
"""A path is at most 4096 bytes."""

STDIN = 0
OUR_MODULES = "ckptflow."
PRELOADED = ("torch", "transformers", "transformers.models.llama.modeling_llama")


def main(arguments: Sequence[str]) -> int:
    """Serve until stdin is closed, or nobody has asked for a while.

    Args:
        arguments: file descriptor of a listening Unix socket; most seconds without a question.
    """
    listening, idle_seconds = socket.socket(fileno=int(arguments[0])), float(arguments[1])
    try:
        _serve(listening, idle_seconds)
    finally:
        shutil.rmtree(os.path.dirname(listening.getsockname()), ignore_errors=True)
    return 0


def _serve(listening: socket.socket, idle_seconds: float) -> None:
    is_warm = False
    while True:
        ready, _, _ = select.select([listening.fileno(), STDIN], [], [], idle_seconds)
        if not ready or STDIN in ready:
            return
        if not is_warm:  # not before the first question
            warm_up()
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
            is_warm = True
            continue  # whoever started this one may have gone meanwhile
        asker, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            _keep(asker)
        asker.close()


def warm_up() -> None:
    """Import what nearly every model needs; where that fails, each process tries and tells for itself."""
    with contextlib.suppress(ImportError):
        for name in PRELOADED:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else a collection in a forked process copies all memory


def _keep(asker: socket.socket) -> NoReturn:
    """Fork the process that works, end it when the asker hangs up, tell its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, files, _, _ = socket.recv_fds(asker, MESSAGE_BYTES, 3)
    if not message or len(files) != 3:  # gone already
        os._exit(0)
    read_end, write_end = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(read_end)  # the other end closes when this process ends, however it does
        asker.close()
        os._exit(_work(json.loads(message), files))
    os.close(write_end)
    for file in files:
        os.close(file)
    ready, _, _ = select.select([read_end, asker.fileno()], [], [])
    if asker.fileno() in ready:
        os.kill(worker, signal.SIGKILL)
    _, status = os.waitpid(worker, 0)
    with contextlib.suppress(OSError):  # nobody is left to be told
        asker.sendall(json.dumps(os.waitstatus_to_exitcode(status)).encode() + b"\n")
    os._exit(0)


def _work(question: dict[str, str], files: Sequence[int]) -> int:
    """Be ``python -P -m MODULE ARGUMENT``; gives the exit status."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    try:
        if not question["module"].startswith(OUR_MODULES):
            raise ValueError(f"{question['module']} is not a module of {OUR_MODULES}")
        sys.argv = [question["module"], question["argument"]]
        runpy.run_module(question["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except Exception:  # noqa: BLE001 - what an interpreter does with it
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
