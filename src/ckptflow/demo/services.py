"""The two servers of the demo, and the environment that leads a flow to them and nowhere else."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptflow.demo.options import BUCKET
from ckptflow.demo.prefect_server import RunningPrefectServer, start_prefect_server

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

    from ckptflow.processes.localservers import RunningServer


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The two servers of the demo and the environment that leads to them."""

    prefect: RunningPrefectServer
    s3: RunningServer
    env: Mapping[str, str]

    def flow_env(self) -> dict[str, str]:
        """The whole environment for a process that runs a flow."""
        # The person's own Prefect and AWS settings must not lead the demo to a real workspace or bucket.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "AWS_"))}
        return inherited | dict(self.env)

    def s3_client(self) -> S3Client:
        """A client of the demo's own S3 server."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.s3.endpoint_url,
            aws_access_key_id=self.env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.env["AWS_SECRET_ACCESS_KEY"],
            region_name=self.env["AWS_DEFAULT_REGION"],
        )


def start_services(stack: ExitStack, work_dir: Path) -> Services:
    """Starts both with their data below ``work_dir``; leaving ``stack`` stops them.

    Raises:
        CkptflowError: one did not start.
    """
    from ckptflow.processes.localservers import start_seaweedfs

    # A proxy that the environment names can't reach this machine's loopback interface.
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
    access_key, secret_key = "demo", secrets.token_hex(16)
    s3 = start_seaweedfs(work_dir / "s3", access_key=access_key, secret_key=secret_key)
    stack.callback(s3.stop)
    prefect = start_prefect_server(work_dir / "prefect", log_path=work_dir / "prefect-server.log")
    stack.callback(prefect.stop)
    env = prefect.client_env() | {
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": s3.endpoint_url,
        "HF_HUB_OFFLINE": "1",
    }
    services = Services(prefect=prefect, s3=s3, env=env)
    services.s3_client().create_bucket(Bucket=BUCKET)
    return services
