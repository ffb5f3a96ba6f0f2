"""How long tasks may take and how often they are tried: settings of the site, from ``CKPTFLOW_…`` variables."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

HOUR = 3600.0


class Limits(BaseSettings):
    """Times in seconds; ``CKPTFLOW_FILE_TIMEOUT_SECONDS`` sets ``file_timeout_seconds``, and so on.

    Attributes:
        retries: how often a task that failed by what can heal is tried again.
        retry_delay_seconds: wait before the first of them; it doubles each time, plus up to half of it at random.
        metadata_timeout_seconds: reading and planning, which touch no tensor data.
        compare_timeout_seconds: proving that replicas and ties hold the same bits, all of the checkpoint's.
        file_timeout_seconds: one weight file. 5 GB take seconds on a disk, minutes on a busy network file system.
        validate_timeout_seconds: comparing every element, and the forward pass.
        upload_timeout_seconds: all files of a model.
        files_at_once: weight files merged at a time; each uses all cores, so few keep the disk busy.
    """

    model_config = SettingsConfigDict(env_prefix="CKPTFLOW_", frozen=True)

    retries: int = Field(3, ge=0)
    retry_delay_seconds: float = Field(2.0, ge=0)
    metadata_timeout_seconds: float = Field(0.5 * HOUR, gt=0)
    compare_timeout_seconds: float = Field(4 * HOUR, gt=0)
    file_timeout_seconds: float = Field(1 * HOUR, gt=0)
    validate_timeout_seconds: float = Field(4 * HOUR, gt=0)
    upload_timeout_seconds: float = Field(12 * HOUR, gt=0)
    files_at_once: int = Field(2, gt=0)


LIMITS = Limits()
