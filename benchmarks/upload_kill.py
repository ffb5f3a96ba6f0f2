"""Kill ``ckptflow upload`` at random moments, run it again each time, and count at the server.

Three ways in one go: to a real S3 server without TLS and with it, where a proxy before the server counts each request
that reached it, and to a loopback Hub that speaks the Hub's protocol to the real client. A reader polls the
destination all the while. A model that is published before the next kill is checked, and the next one goes to a place
of its own. For each place all of this must hold, or the exit code is 1:

- all bytes at the destination are equal to the local ones;
- no run sent a file that was finished when it began, on S3 no part that the server had acknowledged by then, and
  nothing twice;
- no look of the reader saw the marker or the index without all the files that they name, in full size;
- nothing half is left: no open multipart upload, no commit that names what was never sent.

What was on its way when a kill came may reach the server while the next run is at work already. Nobody can know of it,
so that it is sent again; it is not counted, since the server had not acknowledged it when that run began.

    python benchmarks/upload_kill.py --kills 20 --files 5 --megabytes 64
    python benchmarks/upload_kill.py --kills 4 --ways hub
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests/support"))

from publishing import MIB, Bucket, HubRepo, contents_of, write_model  # noqa: E402
from servers.hub import running_hub  # noqa: E402
from servers.proxy import Request, running_proxy  # noqa: E402
from servers.seaweed import running_seaweed  # noqa: E402
from servers.tls import self_signed  # noqa: E402

WAYS = ("s3", "s3-tls", "hub")
INDEX = "model.safetensors.index.json"
MARKER = "ckptflow.json"
BUCKET = "killed"

#: Name of a file (of an LFS object: its id), and number of the part, "" where it came whole.
Content = tuple[str, str]


class Place(Protocol):
    """Where one model goes, seen past the client."""

    @property
    def uri(self) -> str: ...
    def sizes(self) -> dict[str, int]: ...
    def read_all(self) -> dict[str, bytes]: ...

    def received_bytes(self) -> int:
        """Bytes of files that the server has acknowledged so far, those that came twice counted twice."""

    def came(self) -> list[Content]:
        """What was sent so far, in order."""

    def finished(self) -> set[str]:
        """Files that are whole at the server by now."""

    def acknowledged(self) -> set[Content]:
        """Parts that the server has acknowledged so far, and that a later run can go on with."""

    def faults(self) -> list[str]:
        """What is left half."""


@dataclass
class BucketPlace(Bucket):
    """A prefix of a bucket."""

    def received_bytes(self) -> int:
        return sum(each.length for each in list(self.proxy.requests) if self._is_ours(each.key) and each.is_content)

    def came(self) -> list[Content]:
        return self._contents(self.proxy.passed)

    def finished(self) -> set[str]:
        return set(self.sizes())

    def acknowledged(self) -> set[Content]:
        return set(self._contents(self.proxy.requests))

    def faults(self) -> list[str]:
        return [f"an open upload is left: {key}" for key in self.leftovers()]

    def _contents(self, requests: list[Request]) -> list[Content]:
        prefix = f"{self.bucket}/{self.prefix}"
        return [
            (each.key.removeprefix(prefix), each.query.get("partNumber", ""))
            for each in list(requests)
            if each.is_content and self._is_ours(each.key)
        ]

    def _is_ours(self, key: str) -> bool:
        return key.startswith(f"{self.bucket}/{self.prefix}")


@dataclass
class HubPlace(HubRepo):
    """A repository on the loopback Hub, whose LFS objects are there before the commit that names them."""

    def sizes(self) -> dict[str, int]:
        commit = self.repo.commit_of(self.branch) if self.repo_id in self.hub.repos else None
        found = {}
        for name, entry in ({} if commit is None else commit.files).items():
            is_there = entry.sha256 is None or self.repo.lfs_path(entry.sha256).is_file()
            found[name] = entry.size if is_there else -1
        return {name: size for name, size in found.items() if name not in (".gitattributes", "README.md")}

    def received_bytes(self) -> int:
        return sum(self.repo.received_bytes.values()) if self.repo_id in self.hub.repos else 0

    def came(self) -> list[Content]:
        puts = self.hub.seen("PUT", f"^/lfs/{self.repo_id}/")
        return [(each.path.rpartition("/")[2], each.query.get("part", "")) for each in puts]

    def finished(self) -> set[str]:
        return set(self.repo.stored) if self.repo_id in self.hub.repos else set()

    def acknowledged(self) -> set[Content]:
        return set()  # the Hub's client begins an object anew

    def faults(self) -> list[str]:
        commits = len(self.repo.branches[self.branch].history())
        return [
            *(f"a commit names what was never sent: {path}" for path in self.repo.missing_objects()),
            *([] if commits == 2 else [f"{commits - 1} commits for one model"]),
        ]


@dataclass
class Reader(threading.Thread):
    """Polls one place; notes each look that saw a promise without what was promised."""

    place: Place
    expected: dict[str, int]
    looks: int = 0
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self._is_over = threading.Event()

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        weights = {name: size for name, size in self.expected.items() if name.endswith(".safetensors")}
        while not self._is_over.wait(0.03):
            seen = self.place.sizes()
            self.looks += 1
            if MARKER in seen and seen != self.expected:
                self.faults.append(f"a reader saw the marker with {sorted(seen)}")
            if INDEX in seen and not weights.items() <= seen.items():
                self.faults.append(f"a reader saw the index with {sorted(seen)}")

    def stop(self) -> None:
        self._is_over.set()
        self.join()


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A running server: places on it, and what the client must know."""

    name: str
    environment: dict[str, str]
    open_places: Iterator[Place]
    #: Bytes after which a kill comes, at most, as a share of a weight file: the Hub's client begins a file anew.
    largest_share: float


@contextmanager
def running(name: str, work: Path) -> Iterator[Way]:
    """One of ``WAYS``."""
    if name == "hub":
        with running_hub(work / "hub") as hub:
            repos = (HubPlace(hub=hub, repo_id=f"tester/model-{number}") for number in range(1, 1000))
            yield Way(name=name, environment=hub.environment(), open_places=repos, largest_share=2.0)
        return
    (work / name).mkdir()
    tls = self_signed(work / name) if name == "s3-tls" else None
    with running_seaweed(work / name / "server", tls=tls) as server, running_proxy(server.endpoint_url, tls) as proxy:
        client = server.client()
        client.create_bucket(Bucket=BUCKET)
        places = (
            BucketPlace(uri=f"s3://{BUCKET}/model-{number}", client=client, proxy=proxy) for number in range(1, 1000)
        )
        environment = server.environment(proxy.endpoint_url)
        yield Way(name=name, environment=environment, open_places=places, largest_share=0.5)


def main() -> None:
    """Command line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and the server with it
    arguments = _parse()
    work = Path(arguments.directory)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    model = write_model(work / "model", weight_bytes=(int(arguments.megabytes * MIB),) * arguments.files)
    verdicts = []
    for name in arguments.ways:
        with running(name, work) as way:
            verdicts.append(_try(arguments, model, way, work / "log"))
    shutil.rmtree(work)
    print("\n".join(verdicts))
    raise SystemExit(0 if all(verdict.startswith("PASS") for verdict in verdicts) else 1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--files", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=64, help="size of each weight file, in MiB")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", default="/tmp/ckptflow-upload-kill", help="emptied first")
    return parser.parse_args()


def _try(arguments: argparse.Namespace, model: Path, way: Way, log: Path) -> str:
    """One way, with all its kills; the verdict in one line, after a line for each kill and each fault."""
    began = time.monotonic()
    local = contents_of(model)
    weights_bytes = arguments.files * arguments.megabytes * MIB
    moments = random.Random(f"{arguments.seed} {way.name}")
    faults: list[str] = []
    kills = looks = published = 0
    while kills < arguments.kills or not published:
        place = next(way.open_places)
        command = [str(Path(sys.executable).with_name("ckptflow")), "upload", str(model), place.uri, "--json"]
        reader = Reader(place, {name: len(content) for name, content in local.items()})
        reader.start()
        is_killed = True
        while is_killed:
            # One in seven comes after the last weight file: while the rest is put, or the commit made.
            limit = moments.uniform(0.02, way.largest_share) * arguments.megabytes * MIB
            if moments.random() < 0.15:
                limit = weights_bytes - place.received_bytes()
            wait = moments.uniform(0, 0.1)
            came, finished, acknowledged = len(place.came()), place.finished(), place.acknowledged()
            is_killed = _run(
                command, {**os.environ, **way.environment}, log, place, kills < arguments.kills, limit, wait
            )
            kills += is_killed
            faults += _sent_again(place.came()[came:], finished, acknowledged)
            if is_killed:
                count = len(place.finished())
                print(f"{way.name}: kill {kills}: {count} finished, {place.received_bytes() >> 20} MiB", flush=True)
        reader.stop()
        published += 1
        looks += reader.looks
        faults += reader.faults + place.faults()
        if place.read_all() != local:
            faults.append(f"bytes differ at {place.uri}")
    print("".join(f"{way.name}: FAULT: {fault}\n" for fault in faults), end="")
    verdict = f"FAIL {way.name}: {len(faults)} faults" if faults else f"PASS {way.name}: no fault"
    seconds = time.monotonic() - began
    return f"{verdict}, {kills} kills, {published} models published, {looks} looks of a reader, {seconds:.0f} s"


def _sent_again(came: list[Content], finished: set[str], acknowledged: set[Content]) -> list[str]:
    """Faults of one run: ``came`` is what it sent, the others what there was when it began."""
    return [
        *(f"sent again after it was finished: {name}" for name in sorted({name for name, _ in came} & finished)),
        *(f"sent again after it was acknowledged: {content}" for content in sorted(set(came) & acknowledged)),
        *(f"sent {count} times by one run: {content}" for content, count in Counter(came).items() if count > 1),
    ]


def _run(
    command: list[str],
    environment: dict[str, str],
    log: Path,
    place: Place,
    is_to_be_killed: bool,
    limit_bytes: float,
    wait_seconds: float,
) -> bool:
    """Kill -9 once so many bytes have been acknowledged, a little later; False: it ended before, and well."""
    began_at = place.received_bytes()
    with log.open("wb") as output:
        child = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    while is_to_be_killed and child.poll() is None:
        if place.received_bytes() - began_at >= limit_bytes:
            time.sleep(wait_seconds)
            child.send_signal(signal.SIGKILL)
            break
        time.sleep(0.005)
    if child.wait() == -signal.SIGKILL:
        return True
    if child.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text(errors='replace')}")
    return False


if __name__ == "__main__":
    main()
