"""Rows of projections in the order that transformers has them. Windows only, no values."""

from __future__ import annotations

from ckptflow.tensors import Piece, TensorSource, concatenate, narrow
from ckptflow.transforms.megatron_names import split_qkv


def pairs_to_halves(source: TensorSource, head: int) -> TensorSource:
    """Each head's even rows, then its odd ones: rotary pairs side by side become halves.

    Meta's rotary embedding turns rows 2i and 2i + 1 of a head together, transformers' rows i and i + head / 2
    (``permute`` of transformers' convert_llama_weights_to_hf.py). Two pieces for each head and piece of ``source``.

    Args:
        source: shape [heads · head, …].
        head: rows of a head, even.
    """
    half, itemsize = head // 2, source.dtype.itemsize
    pieces = []
    for p in source.pieces:
        begin, end = p.offsets[0], p.offsets[0] + p.sizes[0]
        for start in range(begin - begin % head, end, head):
            for odd in (0, 1):
                low = max(begin, start)
                first = low + (low - start - odd) % 2
                count = (min(end, start + head) - first + 1) // 2
                if count <= 0:
                    continue
                at = p.offset_bytes + (first - begin) * p.strides[0] * itemsize
                row = start + odd * half + (first - start) // 2
                strides, sizes = (2 * p.strides[0], *p.strides[1:]), (count, *p.sizes[1:])
                pieces.append(Piece(p.file, at, strides, (row, *p.offsets[1:]), sizes))
    return TensorSource(source.shape, source.dtype, tuple(pieces))


def groups_to_blocks(source: TensorSource, heads: int, kv_heads: int, head: int) -> TensorSource:
    """All queries, all keys, all values, out of query groups of ``[q…, k, v]``.

    Args:
        source: shape [(heads + 2 · kv_heads) · head, …].
        heads: query heads.
        kv_heads: groups.
        head: rows of a head.
    """
    return concatenate(split_qkv(source, heads, kv_heads, head), 0)


def blocks_to_groups(source: TensorSource, heads: int, kv_heads: int, head: int) -> TensorSource:
    """Query groups of ``[q…, k, v]`` out of all queries, all keys, all values: the inverse of ``groups_to_blocks``."""
    queries, k_at, v_at = heads // kv_heads * head, heads * head, (heads + kv_heads) * head
    parts = []
    for group in range(kv_heads):
        parts.append(narrow(source, 0, group * queries, queries))
        parts.extend(narrow(source, 0, at + group * head, head) for at in (k_at, v_at))
    return concatenate(parts, 0)
