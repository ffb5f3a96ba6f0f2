"""Which modules of a plan are quantized: their floats are scales and code books of other tensors' numbers.

Every method has its own names (``weight_scale_inv``, ``scales``, ``weight.absmax``, ``SCB``, …), and more come each
year. What they share is the storage: float8, or integers of at most four bytes in a matrix. torch's own integer buffers
are int64, or masks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptflow.plan import PlannedTensor

QUANTIZED_METHODS = frozenset({"awq", "bitsandbytes", "fbgemm_fp8", "fp8", "gptq", "mxfp4"})
"""Values of ``quant_method`` whose files always hold quantized tensors; with others, floats may be meant.

Source: transformers' ``quantizers``; BitNet's "online" mode, for one, rounds bfloat16 weights as the model runs.
"""

_MASKS = ("bias", "mask", "masked_bias")
_BITSANDBYTES = ".quant_state.bitsandbytes__"


def quantized_modules(tensors: Iterable[PlannedTensor]) -> frozenset[str]:
    """FQNs of the modules that hold a quantized tensor; a tensor without a module counts for none."""
    return frozenset(module for tensor in tensors if (module := _marked(tensor)))


def quantized_module_of(fqn: str, modules: frozenset[str]) -> str | None:
    """The one of ``modules`` that a tensor lies in, directly or below; None if in none of them."""
    return next((parent for parent in _parents(fqn) if parent in modules), None)


def _marked(tensor: PlannedTensor) -> str:
    """The module that the tensor shows to be quantized; empty if it shows nothing."""
    module, _, leaf = tensor.fqn.rpartition(".")
    dtype = tensor.source.dtype
    if dtype.name.startswith("float8"):
        return module
    if _BITSANDBYTES in tensor.fqn:  # beside `weight`, which FSDP wants in a float dtype though it holds 4-bit numbers
        return tensor.fqn.partition(_BITSANDBYTES)[0].rpartition(".")[0]
    packed = dtype.kind == "int" and dtype.itemsize <= 4 and len(tensor.shape) >= 2 and leaf not in _MASKS
    return module if packed else ""


def _parents(fqn: str) -> Iterator[str]:
    while "." in fqn:
        fqn = fqn.rpartition(".")[0]
        yield fqn
