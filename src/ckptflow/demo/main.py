"""Tells the story: train, and while training goes on, run the pipeline for each checkpoint; then look at the result."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ckptflow.demo.options import DESTINATION, RUN_NAME, DemoOptions, add_arguments, options_from
from ckptflow.demo.prefect_server import stop_process_group
from ckptflow.demo.services import Services, start_services
from ckptflow.errors import CkptflowError
from ckptflow.processes.askprocess import Server

if TYPE_CHECKING:
    from rich.console import Console


def run_demo(options: DemoOptions, console: Console | None = None) -> int:
    """Runs the whole demonstration and returns the exit status, 0.

    Raises:
        CkptflowError: training, a server or a flow failed; the error names the log. All processes are ended then.
    """
    from rich.console import Console

    from ckptflow.demo import story

    console = console or Console()
    begin = time.monotonic()
    work_dir = options.output_dir.absolute() / time.strftime("%Y%m%d-%H%M%S")
    work_dir.mkdir(parents=True)
    run_dir = work_dir / "runs" / RUN_NAME
    story.introduce(console, run_dir, options.save_steps)
    with _terminated_as_exception(), Server() as ask_server, ExitStack() as stack:
        training = _start_training(run_dir, options.save_steps, work_dir / "training.log")
        stack.callback(stop_process_group, training)
        with console.status("starting a Prefect server and an S3 server while the first steps are trained"):
            services = start_services(stack, work_dir)
        story.show_servers(console, services)
        for global_step in _follow_training(training, options.save_steps[-1], console, work_dir / "training.log"):
            seconds = _publish(run_dir / f"global_step_{global_step}", services, work_dir, ask_server, console)
            story.show_published(console, global_step, seconds)
        story.show_results(console, services, work_dir / "fetched")
        if options.keep:
            stack.pop_all()
        story.say_goodbye(console, services, work_dir, kept=options.keep, seconds=time.monotonic() - begin)
    return 0


def _start_training(run_dir: Path, save_steps: Sequence[int], log_path: Path) -> subprocess.Popen[bytes]:
    with log_path.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "ckptflow.demo.train", str(run_dir), "--save-steps", *map(str, save_steps)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )


def _follow_training(
    training: subprocess.Popen[bytes], last_step: int, console: Console, log_path: Path
) -> Iterator[int]:
    """Yields the global step of each checkpoint when it is complete, with a progress bar in between.

    Training does not wait for the caller: its messages wait in the pipe meanwhile.
    """
    from ckptflow.demo import story

    if training.stdout is None:
        raise ValueError("the training process needs stdout=PIPE")
    lines = iter(training.stdout.readline, b"")
    saved = 0
    while saved < last_step:
        with story.training_progress(console, last_step) as show_step:
            saved = _read_until_saved(lines, show_step)
        if not saved:
            raise CkptflowError("training ended early", file=log_path, found=f"exit status {training.wait()}")
        yield saved
    if training.wait() != 0:
        raise CkptflowError("training failed", file=log_path, found=f"exit status {training.returncode}")


def _read_until_saved(lines: Iterator[bytes], show_step: Callable[[int, float], None]) -> int:
    """The global step of the next checkpoint; 0 when training ended without one."""
    for line in lines:
        message = json.loads(line)
        if "saved" in message:
            return int(message["saved"])
        show_step(message["global_step"], message["loss"])
    return 0


def _publish(step_dir: Path, services: Services, work_dir: Path, ask_server: Server, console: Console) -> float:
    """Runs the post-training flow for one checkpoint, as anybody would from a shell. Returns its seconds."""
    arguments = ["run", str(step_dir), "--to", DESTINATION, "--work-dir", str(work_dir / "merged")]
    log_path = work_dir / f"flow-{step_dir.name}.log"
    begin = time.monotonic()
    with console.status(f"ckptflow run …/{step_dir.name} --to {DESTINATION}"), log_path.open("wb") as log:
        flow = subprocess.Popen(
            [sys.executable, "-m", "ckptflow.cli", *arguments],
            env=services.flow_env() | ask_server.environment(),
            cwd=work_dir,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = flow.wait()
        finally:
            stop_process_group(flow)
    if status != 0:
        last_lines = "\n".join(log_path.read_text(errors="replace").splitlines()[-15:])
        raise CkptflowError(
            "the flow failed", file=log_path, expected="exit status 0", found=f"exit status {status}\n{last_lines}"
        )
    return time.monotonic() - begin


@contextmanager
def _terminated_as_exception() -> Iterator[None]:
    """Within it, SIGTERM raises SystemExit, so that servers are stopped on the way out, as on Ctrl-C."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m ckptflow.demo.main``: the same as ``ckptflow demo``."""
    parser = argparse.ArgumentParser(prog="ckptflow demo", description="Trains a tiny model and publishes it.")
    add_arguments(parser)
    options = options_from(parser.parse_args(argv))
    try:
        return run_demo(options)
    except CkptflowError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; nothing is left running", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
