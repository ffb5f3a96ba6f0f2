"""Megatron's own record of the model (``args``, ``transformer_config.json``), held against the Hugging Face config.

Shapes alone don't show a wrong number of heads or query groups: QKV would be split at the wrong rows without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptflow.errors import InconsistentCheckpointError, UnsupportedCheckpointError
from ckptflow.transforms.megatron_names import MegatronModel

# Megatron's field → name in ``model_dims``; both args (Megatron-LM) and TransformerConfig (verl).
SIZES = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "kv_channels": "head",
    "num_experts": "experts",
    "num_moe_experts": "experts",
    "moe_ffn_hidden_size": "expert_ffn",
}
# Norm weights that are stored minus one.
ZERO_CENTERED = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")


def check_args(args: Mapping[str, Any], model: MegatronModel, origin: str) -> None:
    """Refuse what the config contradicts; ``origin`` is the file that ``args`` came from.

    Raises:
        InconsistentCheckpointError: Megatron was told other sizes than the config has.
        UnsupportedCheckpointError: weights that would have to be computed with.
    """
    dims = model.dims
    is_mla = "kv_rank" in dims
    for field, name in SIZES.items():
        value = args.get(field)
        if type(value) is int and name in dims and value != dims[name] and not (is_mla and name == "head"):
            raise _contradiction(origin, field, dims[name], value)
    groups = args.get("num_query_groups")
    if type(groups) is int and args.get("group_query_attention", True) and not is_mla and groups != dims["kv_heads"]:
        raise _contradiction(origin, "num_query_groups", dims["kv_heads"], groups)
    vocabulary = args.get("vocab_size")
    if type(vocabulary) is int and vocabulary > dims["vocab"]:
        raise _contradiction(origin, "vocab_size", f"at most {dims['vocab']}", vocabulary)
    if args.get("rotary_interleaved") and not is_mla:
        raise UnsupportedCheckpointError(
            "interleaved rotary embeddings: rows of q and k lie in another order than transformers expects",
            file=origin,
            found="rotary_interleaved",
        )
    _check_norms(args, model, origin)


def _check_norms(args: Mapping[str, Any], model: MegatronModel, origin: str) -> None:
    told = [bool(args[name]) for name in ZERO_CENTERED if name in args]
    expected = model.family.zero_centered_norms
    if (told and any(told) != expected) or (expected and not told):
        raise UnsupportedCheckpointError(
            "norm weights are stored around another centre than transformers' model has them",
            file=origin,
            expected=f"{ZERO_CENTERED[1]} = {expected}",
            found=any(told) if told else "nothing that tells",
            fix="their values would have to be changed by one; convert them with Megatron-Bridge",
        )


def _contradiction(origin: str, field: str, expected: object, found: object) -> InconsistentCheckpointError:
    return InconsistentCheckpointError(
        f"Megatron's {field} is not that of config.json",
        file=origin,
        expected=expected,
        found=found,
        fix="name the config of this very model with --config DIR",
    )
