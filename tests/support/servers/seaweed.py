"""A real S3 server for tests, in a directory of its own, killed at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import boto3

from ckptflow.processes.localservers import TlsFiles, start_seaweedfs

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

ACCESS_KEY = "AKTESTPUBLISH0001"
SECRET_KEY = "test+secret/that-must-not-be-seen"


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """Where the server is, and how to get in."""

    endpoint_url: str
    ca_path: Path | None = None

    def environment(self, endpoint_url: str | None = None) -> dict[str, str]:
        """What AWS tools read, and nothing of this machine's own."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": endpoint_url or self.endpoint_url,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            **({} if self.ca_path is None else {"AWS_CA_BUNDLE": str(self.ca_path)}),
        }

    def client(self) -> S3Client:
        """A client of our own, past all that is tested."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            verify=None if self.ca_path is None else str(self.ca_path),
        )


@contextmanager
def running_seaweed(data_dir: Path, tls: TlsFiles | None = None) -> Iterator[S3Server]:
    """Start SeaweedFS, kill -9 at the end."""
    running = start_seaweedfs(data_dir, access_key=ACCESS_KEY, secret_key=SECRET_KEY, tls=tls)
    try:
        yield S3Server(endpoint_url=running.endpoint_url, ca_path=None if tls is None else tls.certificate_path)
    finally:
        running.stop()
