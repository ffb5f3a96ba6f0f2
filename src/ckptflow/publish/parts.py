"""How a file is cut into the parts of a multipart upload. Pure.

Limits: https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptflow.errors import PermanentPublishError

MIB = 1 << 20
MIN_PART_BYTES = 5 * MIB  # all parts but the last
MAX_PART_BYTES = 5 << 30
MAX_PARTS = 10_000
MAX_OBJECT_BYTES = 5 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """Equal parts, the last one shorter; sizes in bytes. An empty file is one empty part."""

    total_bytes: int
    part_bytes: int

    @property
    def count(self) -> int:
        """Number of parts, at least 1."""
        return max(1, -(-self.total_bytes // self.part_bytes))

    def part(self, number: int) -> tuple[int, int]:
        """Offset and length in bytes of part ``number``, which counts from 1 as S3 does."""
        offset = (number - 1) * self.part_bytes
        return offset, min(self.part_bytes, self.total_bytes - offset)


def plan_parts(total_bytes: int, wanted_part_bytes: int, *, max_parts: int = MAX_PARTS) -> PartPlan:
    """Cut ``total_bytes`` so that no limit is met: the part size is raised, to a whole MiB, where it must be.

    Raises:
        PermanentPublishError: the file is larger than an S3 object can be.
    """
    largest = min(MAX_OBJECT_BYTES, max_parts * MAX_PART_BYTES)
    if total_bytes > largest:
        raise PermanentPublishError(
            "the file is larger than an object can be",
            expected=f"at most {largest} bytes",
            found=f"{total_bytes} bytes",
            fix="convert again with a smaller --max-shard-size",
        )
    least = -(-total_bytes // max_parts)
    part_bytes = max(wanted_part_bytes, MIN_PART_BYTES)
    if least > part_bytes:
        part_bytes = -(-least // MIB) * MIB
    return PartPlan(total_bytes=total_bytes, part_bytes=min(part_bytes, MAX_PART_BYTES))
