"""The dtypes between which the engine casts, and the values of each that are the hardest to cast."""

from __future__ import annotations

import numpy as np

from ckptflow.dtypes import DTYPES, numpy_dtype

TARGETS = ("float64", "float32", "float16", "bfloat16")
SOURCES = (*TARGETS, "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")


@np.errstate(all="ignore")
def stressful_values(name: str) -> np.ndarray:
    """Every bit pattern of the small types; random bits, ties, subnormals and edges of the large ones."""
    dtype = numpy_dtype(DTYPES[name])
    if dtype.itemsize <= 2:
        return np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(dtype)
    rng = np.random.default_rng(5)
    random_bits = rng.integers(0, 2 ** (8 * dtype.itemsize), 100_000, f"u{dtype.itemsize}").view(dtype)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(dtype)
    brains = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).astype(dtype)
    steps = (0, 2**-11, 2**-9, 2**-8, -(2**-11), 2**-11 + 2**-23)
    near = [v * (1 + step) for v in (halves, brains) for step in steps]
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000).view(np.float32).astype(dtype)
    around = [np.nextafter(ties, dtype.type(s)) for s in (-np.inf, np.inf)]
    info = np.finfo(dtype)
    edges = [
        0.0,
        -0.0,
        65504,
        65519.99,
        65520,
        -65520,
        3.3895e38,
        3.39616e38,
        info.max,
        info.tiny,
        info.smallest_subnormal,
        2.0**-133,
        2.0**-134,
        2.0**-25,
        2.0**-24,
    ]
    return np.concatenate([random_bits, *near, ties, *around, np.array(edges, dtype)])
