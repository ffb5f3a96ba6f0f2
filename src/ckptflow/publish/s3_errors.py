"""What an S3 error means: may it heal, and if not, what is the cure."""

from __future__ import annotations

import re

from botocore import exceptions as botocore_errors
from botocore.exceptions import BotoCoreError, ClientError

from ckptflow.publish.verdicts import Verdict, parse_retry_after

_CHECKSUM_FIX = (
    'if the server is not AWS and the key works elsewhere, set checksum_mode="when_required" '
    "(or AWS_REQUEST_CHECKSUM_CALCULATION=when_required)"
)
_RIGHTS = (
    "s3:ListBucket, GetObject, PutObject, DeleteObject, AbortMultipartUpload, "
    "ListMultipartUploadParts and ListBucketMultipartUploads"
)

_LOCKED = "choose another destination: this bucket keeps its objects from being replaced (object lock)"

#: Error codes: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
_CURES = {
    "AccessDenied": f"give this key the rights {_RIGHTS} on the bucket and prefix",
    "AllAccessDisabled": "ask the owner of the bucket",
    "AccountProblem": "ask the provider: the account is blocked",
    "ExpiredToken": "renew the session credentials",
    "TokenRefreshRequired": "renew the session credentials",
    "InvalidToken": "renew the session credentials",
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID or the AWS profile, and that the endpoint is the right one",
    "SignatureDoesNotMatch": f"check AWS_SECRET_ACCESS_KEY or the AWS profile; {_CHECKSUM_FIX}",
    "RequestTimeTooSkewed": "set this machine's clock",
    "NoSuchBucket": "create the bucket, or correct its name in the destination",
    "InvalidBucketName": "correct the bucket's name in the destination",
    "PermanentRedirect": "set the region (AWS_REGION) to the bucket's",
    "AuthorizationHeaderMalformed": "set the region (AWS_REGION) to the bucket's",
    "IllegalLocationConstraintException": "set the region (AWS_REGION) to the bucket's",
    "QuotaExceeded": "free space or raise the quota",
    "InsufficientStorage": "free space or raise the quota",
    "XMinioStorageFull": "free space on the server",
    "KeyTooLongError": "shorten the prefix in the destination: a key has at most 1024 bytes",
    "ObjectLocked": _LOCKED,
    "EntityTooLarge": "convert again with a smaller --max-shard-size",
    "NotImplemented": _CHECKSUM_FIX,
    "MissingContentMD5": _CHECKSUM_FIX,
    "InvalidObjectState": "choose another destination: the object is archived",
    "403": f"check the key, and give it the rights {_RIGHTS}",
    "401": "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or the AWS profile",
    "404": "check the bucket and the endpoint",
}
# Of AWS, and of MinIO.
_OBJECT_LOCK = re.compile(r"object lock|WORM", re.IGNORECASE)
_MAY_HEAL = frozenset(
    {
        "BadDigest",  # the bytes were damaged on the way
        "XAmzContentSHA256Mismatch",
        "XAmzContentChecksumMismatch",
        "IncompleteBody",
        "RequestTimeout",
        "RequestTimeoutException",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "RequestLimitExceeded",
        "InternalError",
        "ServiceUnavailable",
        "OperationAborted",
        "ConditionalRequestConflict",
    }
)
_STATUS_MAY_HEAL = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONNECTION_MAY_HEAL = (
    botocore_errors.ConnectionError,
    botocore_errors.HTTPClientError,
    botocore_errors.IncompleteReadError,
    botocore_errors.ResponseStreamingError,
    # An endpoint that answered halfway, or a metadata service that hands out credentials and is busy.
    botocore_errors.CredentialRetrievalError,
)
_SETUP_CURES: tuple[tuple[type[BotoCoreError], str], ...] = (
    (botocore_errors.NoCredentialsError, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or an AWS profile"),
    (botocore_errors.PartialCredentialsError, "set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    (botocore_errors.ProfileNotFound, "correct AWS_PROFILE"),
    (botocore_errors.NoRegionError, "set AWS_REGION"),
    (botocore_errors.ParamValidationError, "correct the bucket and the prefix in the destination"),
)


def error_code(error: ClientError) -> str:
    """The S3 error code; answers to HEAD have no body, so that it is the HTTP status there."""
    return str(error.response.get("Error", {}).get("Code", "")) or str(_status(error))


def judge(error: BotoCoreError | ClientError) -> Verdict:
    """Sort an error of boto3 into what may heal and what will not."""
    if isinstance(error, ClientError):
        return _judge_answer(error)
    for kind, cure in _SETUP_CURES:
        if isinstance(error, kind):
            return Verdict(may_heal=False, found=type(error).__name__, fix=cure)
    if isinstance(error, botocore_errors.SSLError) and "certificate verify failed" in str(error).lower():
        return Verdict(
            may_heal=False,
            found="the server's TLS certificate is not trusted",
            fix="set AWS_CA_BUNDLE to the certificate of the server's authority",
        )
    may_heal = isinstance(error, _CONNECTION_MAY_HEAL)
    fix = "check the network and the endpoint" if may_heal else None
    return Verdict(may_heal=may_heal, found=f"{type(error).__name__}: {error}", fix=fix)


def _judge_answer(error: ClientError) -> Verdict:
    code, status = error_code(error), _status(error)
    message = str(error.response.get("Error", {}).get("Message", ""))
    found = f"{code} (HTTP {status}) {message}".rstrip()
    if code == "AccessDenied" and _OBJECT_LOCK.search(message):
        return Verdict(may_heal=False, found=found, fix=_LOCKED)
    if code in _CURES:
        return Verdict(may_heal=False, found=found, fix=_CURES[code])
    may_heal = code in _MAY_HEAL or status in _STATUS_MAY_HEAL
    return Verdict(
        may_heal=may_heal,
        found=found,
        fix="run it again later" if may_heal else _CURES.get(str(status)),
        retry_after_seconds=_retry_after(error) if may_heal else None,
    )


def is_checksum_refusal(error: ClientError) -> bool:
    """Whether a server that doesn't know the newer checksum headers may mean just that.

    Seen in https://github.com/boto/boto3/issues/4392 and its echoes: NotImplemented, SignatureDoesNotMatch (the
    header is signed by us and not by them), MissingContentMD5, and 400 with the header named in the message.
    """
    if error_code(error) in ("NotImplemented", "SignatureDoesNotMatch", "MissingContentMD5"):
        return True
    if error.operation_name == "HeadObject":  # asks for checksums in a header, and has no body to say what is wrong
        return _status(error) in (400, 501)
    text = str(error.response.get("Error", {})).lower()
    return _status(error) in (400, 501) and "checksum" in text and error_code(error) not in _MAY_HEAL


def is_condition_refusal(error: ClientError) -> bool:
    """Whether the server says that it doesn't know If-None-Match."""
    return _status(error) in (400, 501) and "none-match" in str(error.response.get("Error", {})).lower()


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _retry_after(error: ClientError) -> float | None:
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return parse_retry_after(headers.get("retry-after", ""))
