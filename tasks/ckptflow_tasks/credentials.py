"""Credentials in blocks of the Prefect server: read where a connection is opened, and kept nowhere.

Parameters of runs hold the name of a block only. The document is read as it is, so that an ``aws-credentials`` block of
prefect-aws does not need that package where runs are at work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptflow.errors import PermanentPublishError
from ckptflow.publish.credentials import Credentials, credentials_named

SECRET, AWS = "secret", "aws-credentials"
# Fields of prefect-aws's AwsCredentials → their usual names in the environment.
_AWS_FIELDS = {
    "aws_access_key_id": "AWS_ACCESS_KEY_ID",
    "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "aws_session_token": "AWS_SESSION_TOKEN",
    "region_name": "AWS_REGION",
}
# Whoever set these counts on them: keys without the role, or for another server, would be a surprise.
_NOT_TAKEN = ("profile_name", "assume_role_arn")


@dataclass(frozen=True, slots=True)
class BlockCredentials:
    """Credentials of the block ``secret/NAME`` or ``aws-credentials/NAME``, read anew at each call.

    A Secret holds a Hub token, or the usual names with their values: ``{"AWS_ACCESS_KEY_ID": …}``, as JSON.
    """

    reference: str

    def __call__(self) -> Credentials:
        """Read the block.

        Raises:
            PermanentPublishError: there is no such block, or it holds something else.
        """
        kind, _, name = self.reference.partition("/")
        data = _read_block(kind, name, self.reference)
        where = f"block {self.reference}"
        return _of_secret(data.get("value"), where) if kind == SECRET else _of_aws(data, where)


def _read_block(kind: str, name: str, reference: str) -> Mapping[str, Any]:
    from prefect.client.orchestration import get_client  # seconds to import; whoever names no block does without
    from prefect.exceptions import ObjectNotFound

    try:
        with get_client(sync_client=True) as client:
            return client.read_block_document_by_name(name, kind, include_secrets=True).data
    except ObjectNotFound:
        raise PermanentPublishError(
            "the Prefect server has no such credentials block",
            expected=f"{SECRET}/NAME or {AWS}/NAME",
            found=reference,
            fix="make it in the UI under Blocks",
        ) from None


def _of_secret(value: object, where: str) -> Credentials:
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            return credentials_named({"HF_TOKEN": value.strip()}, where)
        value = parsed
    return credentials_named(value if isinstance(value, dict) else {}, where)


def _of_aws(data: Mapping[str, Any], where: str) -> Credentials:
    client_parameters = data.get("aws_client_parameters") or {}
    names = [name for name in _NOT_TAKEN if data.get(name)]
    names += [name for name in ("endpoint_url", "verify_cert_path") if client_parameters.get(name)]
    if names:
        raise PermanentPublishError(
            "an AWS credentials block gives keys and a region here, and no more",
            file=where,
            found=", ".join(names),
            fix="name the server by the destination's endpoint_url, roles and profiles by AWS_PROFILE on the workers",
        )
    return credentials_named({usual: data.get(field) for field, usual in _AWS_FIELDS.items()}, where)
