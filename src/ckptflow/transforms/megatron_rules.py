"""Which tensor of Megatron-Core becomes which of transformers': rules that the families are made of.

Names are those of Megatron-Core's GPTModel, fused (Transformer Engine) and unfused, and of transformers' models;
pairs as in Megatron-Bridge (https://github.com/NVIDIA-NeMo/Megatron-Bridge) and verl's model merger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptflow.transforms.model_dims import Condition, Config

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


def norm(hf: str, *megatron: str, dim: str = "hidden", when: Condition | None = None) -> Rule:
    """A vector beside the projection that it is fused into, or a module of its own."""
    return Rule(megatron=megatron, hf=(hf,), shape=(dim,), when=when)


def linear(hf: str, megatron: str, out: str, into: str, tp_dim: int | None, when: Condition | None = None) -> Rule:
    """A matrix of ``out`` rows."""
    return Rule(megatron=(f"{megatron}.weight",), hf=(f"{hf}.weight",), shape=(out, into), tp_dim=tp_dim, when=when)


def bias(hf: str, megatron: str, out: str, tp_dim: int | None, when: Condition | None = None) -> Rule:
    """The vector that a projection adds."""
    return Rule(megatron=(f"{megatron}.bias",), hf=(f"{hf}.bias",), shape=(out,), tp_dim=tp_dim, when=when)


def qkv(suffix: str, *rest: str, when: Condition | None = None) -> Rule:
    """Query groups, each ``[q…, k, v]``; weight or bias."""
    return Rule(
        megatron=(f"self_attention.linear_qkv.{suffix}",),
        hf=tuple(f"self_attn.{part}_proj.{suffix}" for part in "qkv"),
        shape=("qkv", *rest),
        kind="qkv",
        tp_dim=0,
        when=when,
    )


def gated(
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


def flag(key: str, default: bool) -> Condition:
    """Whether config.json sets ``key``; ``default`` is transformers'."""
    return lambda config: bool(config.get(key, default))


INPUT_NORM = norm("input_layernorm.weight", "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
MLP_NORM = norm("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
ATTENTION_BIAS = flag("attention_bias", False)
QK_NORM = flag("use_qk_norm", False)
MLP_BIAS = flag("mlp_bias", False)
O_PROJ = linear("self_attn.o_proj", "self_attention.linear_proj", "hidden", "attention", 1)
ATTENTION = (INPUT_NORM, qkv("weight", "hidden"), O_PROJ, MLP_NORM)
OPTIONAL_BIASES = (
    qkv("bias", when=ATTENTION_BIAS),
    bias("self_attn.o_proj", "self_attention.linear_proj", "hidden", None, when=ATTENTION_BIAS),
)


def qk_norms(when: Condition | None = None) -> tuple[Rule, Rule]:
    """Norms on each head's queries and keys."""
    return (
        norm("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", dim="head", when=when),
        norm("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", dim="head", when=when),
    )


QK_NORMS = qk_norms()
DENSE = gated("mlp", "mlp", "ffn")
LLAMA_MLP_BIASES = (
    Rule(
        megatron=("mlp.linear_fc1.bias",),
        hf=("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        shape=("2*ffn",),
        kind="gate_up",
        tp_dim=0,
        when=MLP_BIAS,
    ),
    bias("mlp.down_proj", "mlp.linear_fc2", "hidden", None, when=MLP_BIAS),
)


def router(hf: str) -> Rule:
    """One row for each expert."""
    return linear(hf, "mlp.router", "experts", "hidden", None)


EXPERT = "mlp.experts.local_experts.{expert}"
QWEN_MOE = (router("mlp.gate"), *gated(EXPERT, "mlp.experts.{expert}", "expert_ffn"))
DEEPSEEK_MOE = (*QWEN_MOE, *gated("mlp.shared_experts", "mlp.shared_experts", "shared_ffn"))
EXPERT_BIAS = Rule(megatron=("mlp.router.expert_bias",), hf=("mlp.gate.e_score_correction_bias",), shape=("experts",))


def _has_q_rank(config: Config) -> bool:
    return config.get("q_lora_rank") is not None


MLA = (
    norm("input_layernorm.weight", "input_layernorm.weight"),
    linear("self_attn.q_proj", "self_attention.linear_q_proj", "q_up", "hidden", 0, lambda c: not _has_q_rank(c)),
    linear("self_attn.q_a_proj", "self_attention.linear_q_down_proj", "q_rank", "hidden", 0, _has_q_rank),
    norm(
        "self_attn.q_a_layernorm.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.q_layernorm.weight",
        dim="q_rank",
        when=_has_q_rank,
    ),
    linear("self_attn.q_b_proj", "self_attention.linear_q_up_proj", "q_up", "q_rank", 0, _has_q_rank),
    linear("self_attn.kv_a_proj_with_mqa", "self_attention.linear_kv_down_proj", "kv_down", "hidden", 0),
    norm(
        "self_attn.kv_a_layernorm.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        "self_attention.kv_layernorm.weight",
        dim="kv_rank",
    ),
    linear("self_attn.kv_b_proj", "self_attention.linear_kv_up_proj", "kv_up", "kv_rank", 0),
    O_PROJ,
    MLP_NORM,
)
GEMMA2_NORMS = (
    INPUT_NORM,
    norm("post_attention_layernorm.weight", "self_attention.linear_proj.post_layernorm.weight"),
    norm("pre_feedforward_layernorm.weight", "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    norm("post_feedforward_layernorm.weight", "mlp.linear_fc2.post_layernorm.weight"),
)
