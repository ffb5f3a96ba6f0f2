"""How Megatron-Core's tensors are named and cut in each model family. Adding a family is a table here, not code.

Names are those of Megatron-Core's GPTModel, fused (Transformer Engine) and unfused, and of transformers' models;
pairs as in Megatron-Bridge (https://github.com/NVIDIA-NeMo/Megatron-Bridge) and verl's model merger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Config = Mapping[str, Any]
Condition = Callable[[Config], bool]
Kind = Literal["copy", "qkv", "gate_up", "vocab"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One Megatron tensor and what becomes of it.

    Attributes:
        megatron: its possible names; exactly one must be there. ``{expert}`` is the global number of an expert.
        hf: names of the results: one, or q, k, v, or gate and up.
        shape: global shape in Megatron, in names of ``model_dims.named_dims``.
        kind: ``qkv`` is split by query groups, ``gate_up`` in halves, ``vocab`` is cut to the vocabulary.
        tp_dim: dim that tensor parallelism splits; None where each rank has all of it.
        when: whether a config has it; None for always.
    """

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    shape: tuple[str, ...]
    kind: Kind = "copy"
    tp_dim: int | None = None
    when: Condition | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The rules of one family; those of layers are under ``decoder.layers.N.`` and ``model.layers.N.``.

    Attributes:
        model_types: ``model_type`` in config.json.
        attention: rules of each layer's attention and norms.
        dense: rules of a dense layer's MLP.
        moe: rules of a mixture layer's MLP; those with ``{expert}`` hold for each expert.
        is_moe_layer: whether layer N is a mixture.
        zero_centered_norms: norms multiply by ``1 + weight``, on both sides.
        tied_by_default: what ``tie_word_embeddings`` is where config.json leaves it out.
    """

    model_types: tuple[str, ...]
    attention: tuple[Rule, ...]
    dense: tuple[Rule, ...]
    moe: tuple[Rule, ...] = ()
    is_moe_layer: Callable[[Config, int], bool] = lambda config, layer: False
    zero_centered_norms: bool = False
    tied_by_default: bool = False


EMBEDDING = Rule(
    megatron=("embedding.word_embeddings.weight",),
    hf=("model.embed_tokens.weight",),
    shape=("vocab", "hidden"),
    kind="vocab",
    tp_dim=0,
)
FINAL_NORM = Rule(
    megatron=("decoder.final_layernorm.weight", "decoder.final_norm.weight"),
    hf=("model.norm.weight",),
    shape=("hidden",),
)
OUTPUT = Rule(
    megatron=("output_layer.weight",), hf=("lm_head.weight",), shape=("vocab", "hidden"), kind="vocab", tp_dim=0
)
VALUE_HEAD = (
    Rule(megatron=("output_layer.weight",), hf=("score.weight",), shape=("labels", "hidden")),
    Rule(megatron=("output_layer.bias",), hf=("score.bias",), shape=("labels",)),
)


def _norm(hf: str, *megatron: str, dim: str = "hidden", when: Condition | None = None) -> Rule:
    return Rule(megatron=megatron, hf=(hf,), shape=(dim,), when=when)


def _linear(hf: str, megatron: str, out: str, into: str, tp_dim: int | None, when: Condition | None = None) -> Rule:
    return Rule(megatron=(f"{megatron}.weight",), hf=(f"{hf}.weight",), shape=(out, into), tp_dim=tp_dim, when=when)


def _bias(hf: str, megatron: str, out: str, tp_dim: int | None, when: Condition | None = None) -> Rule:
    return Rule(megatron=(f"{megatron}.bias",), hf=(f"{hf}.bias",), shape=(out,), tp_dim=tp_dim, when=when)


def _qkv(suffix: str, *rest: str, when: Condition | None = None) -> Rule:
    return Rule(
        megatron=(f"self_attention.linear_qkv.{suffix}",),
        hf=tuple(f"self_attn.{part}_proj.{suffix}" for part in "qkv"),
        shape=("qkv", *rest),
        kind="qkv",
        tp_dim=0,
        when=when,
    )


def _gated(
    megatron: str, hf: str, ffn: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Rule, Rule]:
    """``linear_fc1`` is [gate; up], ``linear_fc2`` the way down."""
    gate, up, down = (f"{hf}.{name}.weight" for name in names)
    return (
        Rule(
            megatron=(f"{megatron}.linear_fc1.weight",),
            hf=(gate, up),
            shape=(f"2*{ffn}", "hidden"),
            kind="gate_up",
            tp_dim=0,
        ),
        Rule(megatron=(f"{megatron}.linear_fc2.weight",), hf=(down,), shape=("hidden", ffn), tp_dim=1),
    )


def _flag(key: str, default: bool) -> Condition:
    return lambda config: bool(config.get(key, default))


INPUT_NORM = _norm("input_layernorm.weight", "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
MLP_NORM = _norm("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
ATTENTION_BIAS = _flag("attention_bias", False)
MLP_BIAS = _flag("mlp_bias", False)
O_PROJ = _linear("self_attn.o_proj", "self_attention.linear_proj", "hidden", "attention", 1)
ATTENTION = (INPUT_NORM, _qkv("weight", "hidden"), O_PROJ, MLP_NORM)
OPTIONAL_BIASES = (
    _qkv("bias", when=ATTENTION_BIAS),
    _bias("self_attn.o_proj", "self_attention.linear_proj", "hidden", None, when=ATTENTION_BIAS),
)
QK_NORMS = (
    _norm("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", dim="head"),
    _norm("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", dim="head"),
)
DENSE = _gated("mlp", "mlp", "ffn")
LLAMA_MLP_BIASES = (
    Rule(
        megatron=("mlp.linear_fc1.bias",),
        hf=("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        shape=("2*ffn",),
        kind="gate_up",
        tp_dim=0,
        when=MLP_BIAS,
    ),
    _bias("mlp.down_proj", "mlp.linear_fc2", "hidden", None, when=MLP_BIAS),
)


def _router(hf: str) -> Rule:
    return _linear(hf, "mlp.router", "experts", "hidden", None)


EXPERT = "mlp.experts.local_experts.{expert}"
QWEN_MOE = (_router("mlp.gate"), *_gated(EXPERT, "mlp.experts.{expert}", "expert_ffn"))


def _qwen_sparse(config: Config, layer: int) -> bool:
    # transformers: Qwen2MoeDecoderLayer, Qwen3MoeDecoderLayer.
    step = int(config.get("decoder_sparse_step") or 1)
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % step == 0


def _deepseek_sparse(config: Config, layer: int) -> bool:
    frequency = int(config.get("moe_layer_freq") or 1)
    return layer >= int(config.get("first_k_dense_replace") or 0) and layer % frequency == 0


def _has_q_rank(config: Config) -> bool:
    return config.get("q_lora_rank") is not None


MLA = (
    _norm("input_layernorm.weight", "input_layernorm.weight"),
    _linear("self_attn.q_proj", "self_attention.linear_q_proj", "q_up", "hidden", 0, lambda c: not _has_q_rank(c)),
    _linear("self_attn.q_a_proj", "self_attention.linear_q_down_proj", "q_rank", "hidden", 0, _has_q_rank),
    _norm(
        "self_attn.q_a_layernorm.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.q_layernorm.weight",
        dim="q_rank",
        when=_has_q_rank,
    ),
    _linear("self_attn.q_b_proj", "self_attention.linear_q_up_proj", "q_up", "q_rank", 0, _has_q_rank),
    _linear("self_attn.kv_a_proj_with_mqa", "self_attention.linear_kv_down_proj", "kv_down", "hidden", 0),
    _norm(
        "self_attn.kv_a_layernorm.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        "self_attention.kv_layernorm.weight",
        dim="kv_rank",
    ),
    _linear("self_attn.kv_b_proj", "self_attention.linear_kv_up_proj", "kv_up", "kv_rank", 0),
    O_PROJ,
    MLP_NORM,
)
GEMMA2_NORMS = (
    INPUT_NORM,
    _norm("post_attention_layernorm.weight", "self_attention.linear_proj.post_layernorm.weight"),
    _norm("pre_feedforward_layernorm.weight", "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    _norm("post_feedforward_layernorm.weight", "mlp.linear_fc2.post_layernorm.weight"),
)

FAMILIES = (
    Family(
        model_types=("llama", "mistral"), attention=(*ATTENTION, *OPTIONAL_BIASES), dense=(*DENSE, *LLAMA_MLP_BIASES)
    ),
    Family(model_types=("qwen2",), attention=(*ATTENTION, _qkv("bias")), dense=DENSE),
    Family(model_types=("qwen3",), attention=(*ATTENTION, *QK_NORMS, *OPTIONAL_BIASES), dense=DENSE),
    Family(
        model_types=("qwen2_moe",),
        attention=(*ATTENTION, _qkv("bias", when=_flag("qkv_bias", True))),
        dense=DENSE,
        moe=(
            *QWEN_MOE,
            *_gated("mlp.shared_experts", "mlp.shared_expert", "shared_ffn"),
            Rule(
                megatron=("mlp.shared_experts.gate_weight",),
                hf=("mlp.shared_expert_gate.weight",),
                shape=("one", "hidden"),
            ),
        ),
        is_moe_layer=_qwen_sparse,
    ),
    Family(
        model_types=("qwen3_moe",),
        attention=(*ATTENTION, *QK_NORMS, *OPTIONAL_BIASES),
        dense=DENSE,
        moe=QWEN_MOE,
        is_moe_layer=_qwen_sparse,
    ),
    Family(
        model_types=("mixtral",),
        attention=ATTENTION,
        dense=(),
        moe=(
            _router("block_sparse_moe.gate"),
            *_gated(EXPERT, "block_sparse_moe.experts.{expert}", "expert_ffn", ("w1", "w3", "w2")),
        ),
        is_moe_layer=lambda config, layer: True,
    ),
    Family(
        model_types=("deepseek_v3",),
        attention=MLA,
        dense=DENSE,
        moe=(
            *QWEN_MOE,
            Rule(megatron=("mlp.router.expert_bias",), hf=("mlp.gate.e_score_correction_bias",), shape=("experts",)),
            *_gated("mlp.shared_experts", "mlp.shared_experts", "shared_ffn"),
        ),
        is_moe_layer=_deepseek_sparse,
    ),
    Family(
        model_types=("gemma",),
        attention=(*ATTENTION, *OPTIONAL_BIASES),
        dense=DENSE,
        zero_centered_norms=True,
        tied_by_default=True,
    ),
    Family(
        model_types=("gemma2",),
        attention=(*GEMMA2_NORMS, _qkv("weight", "hidden"), O_PROJ, *OPTIONAL_BIASES),
        dense=DENSE,
        zero_centered_norms=True,
        tied_by_default=True,
    ),
    Family(
        model_types=("gemma3_text",),
        attention=(*GEMMA2_NORMS, _qkv("weight", "hidden"), O_PROJ, *QK_NORMS, *OPTIONAL_BIASES),
        dense=DENSE,
        zero_centered_norms=True,
        tied_by_default=True,
    ),
)
