"""The bytes of a zip around its records, as torch.save writes them.

Records are stored; each one's data starts at a multiple of the alignment, reached by padding in the extra field ``FB``
of its local header; sizes and crc32 follow the data; zip64 fields stand where 32 bits don't do, and at the end always.
Sources: caffe2/serialize/inline_container.cc (getPadding), third_party/miniz (mz_zip_writer_add_mem_ex_v2), APPNOTE.TXT
6.3.10.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

DEFAULT_ALIGNMENT: Final = 64
_MAX16: Final = 0xFFFF
_MAX32: Final = 0xFFFFFFFF
_UTF8_NAMES: Final = 0x0800
_SIZES_BEHIND_DATA: Final = 0x0008
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_CENTRAL: Final = struct.Struct("<4s6H3L5H2L")
_END64: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR: Final = struct.Struct("<4sLQL")
_END: Final = struct.Struct("<4s4H2LH")
_END64_BYTES_BEHIND_SIZE: Final = 44
_MADE_BY: Final = 0x031E
_ZIP64_VERSION: Final = 45


def local_header(place: int, name: str, nbytes: int, alignment: int = DEFAULT_ALIGNMENT) -> bytes:
    """The header of a record of ``nbytes`` bytes, written at byte ``place`` of the file."""
    # miniz doesn't know the stored size yet when it writes this.
    text, extra = name.encode(), _zip64(place, nbytes, stored=0)
    start = place + _LOCAL.size + len(text) + len(extra) + 4
    padding = -start % alignment
    extra += b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    return _LOCAL.pack(b"PK\x03\x04", 0, _flags(nbytes), 0, 0, 0, 0, 0, 0, len(text), len(extra)) + text + extra


def descriptor(place: int, nbytes: int, crc32: int) -> bytes:
    """What follows the data of the record whose header is at ``place``."""
    if not nbytes:
        return b""
    sizes = "<4sLQQ" if _zip64(place, nbytes) else "<4sLLL"
    return struct.pack(sizes, b"PK\x07\x08", crc32, nbytes, nbytes)


def central_entry(place: int, name: str, nbytes: int, crc32: int) -> bytes:
    """The record's entry in the directory."""
    text, extra, size = name.encode(), _zip64(place, nbytes), min(nbytes, _MAX32)
    head = (b"PK\x01\x02", 0, 0, _flags(nbytes), 0, 0, 0, crc32, size, size, len(text), len(extra))
    return _CENTRAL.pack(*head, 0, 0, 0, 0, min(place, _MAX32)) + text + extra


def end_records(count: int, start: int, nbytes: int) -> bytes:
    """What follows the directory of ``count`` entries in ``nbytes`` bytes at byte ``start``."""
    end = start + nbytes
    end64 = _END64.pack(
        b"PK\x06\x06",
        _END64_BYTES_BEHIND_SIZE,
        _MADE_BY,
        _ZIP64_VERSION,
        *(0, 0, count, count),
        nbytes,
        start,
    )
    count, nbytes, start = min(count, _MAX16), min(nbytes, _MAX32), min(start, _MAX32)
    return (
        end64 + _LOCATOR.pack(b"PK\x06\x07", 0, end, 1) + _END.pack(b"PK\x05\x06", 0, 0, count, count, nbytes, start, 0)
    )


def zip_nbytes(records: Iterable[tuple[str, int]], alignment: int) -> int:
    """Size of the file with these records of (name, bytes)."""
    place = count = directory = 0
    for name, nbytes in records:
        directory += len(central_entry(place, name, nbytes, 0))
        count += 1
        place += len(local_header(place, name, nbytes, alignment)) + nbytes + len(descriptor(place, nbytes, 0))
    return place + directory + len(end_records(count, place, directory))


def _flags(nbytes: int) -> int:
    return _UTF8_NAMES | (_SIZES_BEHIND_DATA if nbytes else 0)


def _zip64(place: int, nbytes: int, stored: int | None = None) -> bytes:
    """Extra field 1: data size (as it is and as stored) and place of the header, where they need 64 bits."""
    sizes = [nbytes, nbytes if stored is None else stored] if nbytes >= _MAX32 else []
    values = [*sizes, *([place] if place >= _MAX32 else [])]
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""
