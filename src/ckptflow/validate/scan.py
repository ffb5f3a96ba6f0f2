"""One pass over the values of the output with numpy: finite, not suspiciously zero, checksums as recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ckptflow.files.kinds import RECORD_NAME
from ckptflow.validate.files import Record
from ckptflow.validate.headers import StoredTensor
from ckptflow.validate.report import Check, listing

BLOCK_BYTES = 4 << 20
PAGE_BYTES = 4096

# Unsigned integer of the element's size, and the bits that are all set in NaN and Inf (IEEE 754; OCP FP8 for the
# float8 types, of which e4m3fn and e8m0fnu have NaN but no Inf).
NONFINITE_BITS = {
    "float64": ("u8", 0x7FF0000000000000),
    "float32": ("u4", 0x7F800000),
    "float16": ("u2", 0x7C00),
    "bfloat16": ("u2", 0x7F80),
    "float8_e4m3fn": ("u1", 0x7F),
    "float8_e5m2": ("u1", 0x7C),
    "float8_e8m0fnu": ("u1", 0xFF),
    "complex64": ("u4", 0x7F800000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """What one tensor holds: elements that are NaN or Inf, whether all bytes are zero, and the hash of its bytes."""

    nonfinite: int
    zero: bool
    checksum: str


def scan_tensors(
    tensors: Mapping[str, StoredTensor], progress: Callable[[int], None], threads: int
) -> dict[str, Scanned]:
    """Read every tensor once; memory is one block per thread."""
    with ThreadPoolExecutor(threads) as pool:
        results = pool.map(lambda tensor: _scan(tensor, progress), tensors.values())
        return dict(zip(tensors, results, strict=True))


class TensorScan:
    """Takes the bytes of one tensor in order."""

    def __init__(self, tensor: StoredTensor) -> None:
        import numpy as np
        import xxhash

        self._tensor = tensor
        self._digest = xxhash.xxh3_128()
        code, self._bits = NONFINITE_BITS.get(tensor.dtype.name, ("u1", 0))
        self._mask = np.array(self._bits, dtype=code)
        self._nonfinite, self._zero = 0, True
        self._rest = b""

    def add(self, block: bytes | memoryview) -> None:
        """Take the next bytes; an element may be cut between two calls."""
        import numpy as np

        self._digest.update(block)
        whole = self._rest + bytes(block) if self._rest else block
        count = len(whole) // self._mask.itemsize * self._mask.itemsize
        self._rest = bytes(whole[count:])
        values = np.frombuffer(whole[:count], dtype=self._mask.dtype)
        self._zero = self._zero and not values.any()
        if self._bits:
            self._nonfinite += int(np.count_nonzero((values & self._mask) == self._mask))

    def result(self) -> Scanned:
        """Of all that was added."""
        zero = self._zero and self._tensor.nbytes > 0
        return Scanned(nonfinite=self._nonfinite, zero=zero, checksum=f"xxh3_128:{self._digest.hexdigest()}")


def _scan(tensor: StoredTensor, progress: Callable[[int], None]) -> Scanned:
    scan, left = TensorScan(tensor), tensor.nbytes
    with open(tensor.file, "rb", buffering=0) as file:
        file.seek(tensor.begin)
        while left:
            block = file.read(min(left, BLOCK_BYTES))
            if not block:
                break  # cut while it is read; the checksum of files says so
            scan.add(block)
            left -= len(block)
            progress(len(block))
    return scan.result()


def check_finite(scanned: Mapping[str, Scanned], allow_nonfinite: bool) -> Check:
    """No NaN, no Inf."""
    bad = [f"{fqn} ({found.nonfinite})" for fqn, found in scanned.items() if found.nonfinite]
    figures = {"tensors": len(scanned), "NaN or Inf": sum(found.nonfinite for found in scanned.values())}
    if bad and not allow_nonfinite:
        return Check(name="finite values", status="failed", detail=f"NaN or Inf in {listing(bad)}", figures=figures)
    if bad:
        detail = f"NaN or Inf, as allowed, in {listing(bad)}"
        return Check(name="finite values", status="warning", detail=detail, figures=figures)
    return Check(name="finite values", status="passed", detail="no NaN, no Inf", figures=figures)


def check_zeros(
    tensors: Mapping[str, StoredTensor],
    scanned: Mapping[str, Scanned],
    zero_tails: Mapping[Path, int] | None = None,
) -> Check:
    """No matrix of zeros, no file that ends in a page of them: what a preallocated, half-written file looks like.

    Args:
        tensors: all tensors.
        scanned: what they hold.
        zero_tails: zero bytes at the end of each weight file, where the files don't lie in a directory.
    """
    zero = [fqn for fqn, found in scanned.items() if found.zero and len(tensors[fqn].shape) > 1]
    tails = []
    for path in sorted({tensor.file for tensor in tensors.values()}):
        tail = zero_tail_bytes(path) if zero_tails is None else zero_tails[path]
        if tail >= PAGE_BYTES:
            ends = {name: t.begin + t.nbytes for name, t in tensors.items() if t.file == path}
            hit = [name for name, end in ends.items() if end > max(ends.values()) - tail]
            tails.append(f"{path.name} ends in {tail} zero bytes, in {listing(hit)}")
    figures = {"zero matrices": len(zero), "files with a zero tail": len(tails)}
    problems = [*([f"all zero: {listing(zero)}"] if zero else []), *tails]
    if problems:
        return Check(name="zeros", status="warning", detail="; ".join(problems), figures=figures)
    return Check(name="zeros", status="passed", detail="no matrix of zeros, no zero-filled tail", figures=figures)


def zero_tail_bytes(path: Path) -> int:
    """How many bytes at the end of a file are zero."""
    size = position = path.stat().st_size
    with open(path, "rb") as file:
        while position:
            begin = max(0, position - BLOCK_BYTES)
            file.seek(begin)
            kept = file.read(position - begin).rstrip(b"\0")
            if kept:
                return size - begin - len(kept)
            position = begin
    return size


def check_tensor_checksums(scanned: Mapping[str, Scanned], record: Record | None) -> Check:
    """Each tensor's bytes against ckptflow.json: says which tensor a damaged file lost."""
    name = "checksums of tensors"
    listed = {} if record is None else record.get("tensors", {})
    wanted = {fqn: listed[fqn]["checksum"] for fqn in scanned if "checksum" in listed.get(fqn, {})}
    if not wanted:
        return Check(name=name, status="skipped", detail=f"no {RECORD_NAME} with checksums here")
    changed = [fqn for fqn, checksum in wanted.items() if scanned[fqn].checksum != checksum]
    figures = {"tensors": len(wanted), "changed": len(changed)}
    if changed:
        return Check(name=name, status="failed", detail=f"not what was written: {listing(changed)}", figures=figures)
    return Check(name=name, status="passed", detail=f"as {RECORD_NAME} says", figures=figures)
