"""What announcing costs training: steps per second without it, and with a server that answers, is away, or hangs.

A small network is trained on one thread; every 20 steps its weights are saved, in all rows, and announced, in all but
the first. That is some ten checkpoints a second, where real runs have a few an hour. The rows take turns, and the
order turns by one each round; ratios are against the first row of the same round.

    python benchmarks/callback_cost.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from ckptflow.callbacks import announce, sending
from ckptflow.demo.prefect_server import free_loopback_port
from measure import spread

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))

from watchlab import running_lab

SAVE_EVERY = 20
WITHOUT, SERVER, AWAY, HANGING = "without", "with a server", "server away", "server hangs"
ROWS = (WITHOUT, SERVER, AWAY, HANGING)


@dataclass(frozen=True, slots=True)
class Loop:
    """One run: ``longest_call`` in seconds, ``pending`` announcements at its end."""

    steps_per_second: float
    longest_call: float
    pending: int


def main() -> None:
    """Command line."""
    arguments = _parse()
    torch.set_num_threads(1)
    loops: dict[str, list[Loop]] = {row: [] for row in ROWS}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory, running_lab(Path(directory)) as lab:
        urls = {SERVER: lab.api_url, AWAY: f"http://127.0.0.1:{free_loopback_port()}/api"}
        _run(Path(directory), WITHOUT, arguments.steps, None)
        _run(Path(directory), SERVER, SAVE_EVERY, lab.api_url)  # imports the readers, as the first save does
        for number in range(arguments.rounds):
            turn = number % len(ROWS)
            for row in (*ROWS[turn:], *ROWS[:turn]):
                with _hanging_server() as hanging_url:
                    url = hanging_url if row == HANGING else urls.get(row)
                    loops[row].append(_run(Path(directory), row, arguments.steps, url))
                print(number + 1, row, f"{loops[row][-1].steps_per_second:.1f} steps/s", flush=True)
    _print(loops, arguments.steps)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    return parser.parse_args()


@contextmanager
def _hanging_server() -> Iterator[str]:
    """Takes connections and never answers; at the end it drops them."""
    taken: list[socket.socket] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)

        def take() -> None:
            while True:
                try:
                    taken.append(listener.accept()[0])
                except OSError:
                    return

        threading.Thread(target=take, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for connection in taken:
                connection.close()


def _run(directory: Path, row: str, steps: int, url: str | None) -> Loop:
    run_dir = directory / "runs" / "cost"
    shutil.rmtree(run_dir, ignore_errors=True)
    os.environ["PREFECT_API_URL"] = url or ""
    announce._sender = sender = sending.Sender()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(64, 256)
    longest = 0.0
    begin = time.perf_counter()
    for step in range(1, steps + 1):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % SAVE_EVERY == 0:
            path = _save(model, run_dir / f"checkpoint-{step}")
            if row != WITHOUT:
                called = time.perf_counter()
                announce.checkpoint_saved(path, global_step=step, metrics={"loss": loss})
                longest = max(longest, time.perf_counter() - called)
    seconds = time.perf_counter() - begin
    pending = len(sender._waiting) + sender._busy
    if row == SERVER:
        sender.wait(60)
    os.environ["PREFECT_API_URL"] = ""  # what is left is given up at the next try, and disturbs no other row
    return Loop(steps / seconds, longest, pending)


def _save(model: torch.nn.Module, directory: Path) -> Path:
    directory.mkdir(parents=True)
    save_file({"bias": model[0].bias.detach()}, directory / "model.safetensors")
    (directory / "trainer_state.json").write_text(json.dumps({}))
    return directory


def _print(loops: dict[str, list[Loop]], steps: int) -> None:
    rounds = len(loops[WITHOUT])
    print(
        f"{steps} steps, a checkpoint every {SAVE_EVERY}, {rounds} rounds, {os.cpu_count()} CPUs; median [min..max]\n"
    )
    print("| row | steps/s | x without | longest call, us | pending at the end |\n|---|---|---|---|---|")
    for row, results in loops.items():
        ratios = [
            one.steps_per_second / base.steps_per_second for one, base in zip(results, loops[WITHOUT], strict=True)
        ]
        calls = "-" if row == WITHOUT else spread([1e6 * one.longest_call for one in results], 0)
        pending = spread([one.pending for one in results], 0)
        print(
            f"| {row} | {spread([o.steps_per_second for o in results], 1)} | {spread(ratios)} | {calls} | {pending} |"
        )


if __name__ == "__main__":
    main()
