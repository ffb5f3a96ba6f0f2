"""Which rules each model family has. Adding a family is a table here, not code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckptflow.transforms.megatron_rules import (
    ATTENTION,
    ATTENTION_BIAS,
    DEEPSEEK_MOE,
    DENSE,
    EXPERT,
    EXPERT_BIAS,
    GEMMA2_NORMS,
    LLAMA_MLP_BIASES,
    MLA,
    O_PROJ,
    OPTIONAL_BIASES,
    QK_NORM,
    QK_NORMS,
    QWEN_MOE,
    Rule,
    bias,
    flag,
    gated,
    qk_norms,
    qkv,
    router,
)
from ckptflow.transforms.model_dims import Config
from ckptflow.transforms.sparse_layers import all_sparse, deepseek_sparse, none_sparse, qwen_sparse


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
    is_moe_layer: Callable[[Config, int], bool] = none_sparse
    zero_centered_norms: bool = False
    tied_by_default: bool = False


FAMILIES = (
    Family(
        model_types=("llama", "mistral"), attention=(*ATTENTION, *OPTIONAL_BIASES), dense=(*DENSE, *LLAMA_MLP_BIASES)
    ),
    Family(
        model_types=("smollm3",),
        attention=(*ATTENTION, *OPTIONAL_BIASES),
        dense=(*DENSE, *LLAMA_MLP_BIASES),
        tied_by_default=True,
    ),
    Family(
        model_types=("seed_oss",),
        attention=(
            *ATTENTION,
            qkv("bias", when=flag("attention_bias", True)),
            bias("self_attn.o_proj", "self_attention.linear_proj", "hidden", None, flag("attention_out_bias", False)),
        ),
        dense=(*DENSE, *LLAMA_MLP_BIASES),
    ),
    Family(model_types=("qwen2",), attention=(*ATTENTION, qkv("bias")), dense=DENSE),
    Family(model_types=("qwen3",), attention=(*ATTENTION, *QK_NORMS, *OPTIONAL_BIASES), dense=DENSE),
    Family(
        model_types=("qwen2_moe",),
        attention=(*ATTENTION, qkv("bias", when=flag("qkv_bias", True))),
        dense=DENSE,
        moe=(
            *QWEN_MOE,
            *gated("mlp.shared_experts", "mlp.shared_expert", "shared_ffn"),
            Rule(
                megatron=("mlp.shared_experts.gate_weight",),
                hf=("mlp.shared_expert_gate.weight",),
                shape=("one", "hidden"),
            ),
        ),
        is_moe_layer=qwen_sparse,
    ),
    Family(
        model_types=("qwen3_moe",),
        attention=(*ATTENTION, *QK_NORMS, *OPTIONAL_BIASES),
        dense=DENSE,
        moe=QWEN_MOE,
        is_moe_layer=qwen_sparse,
    ),
    Family(
        model_types=("mixtral",),
        attention=ATTENTION,
        dense=(),
        moe=(
            router("block_sparse_moe.gate"),
            *gated(EXPERT, "block_sparse_moe.experts.{expert}", "expert_ffn", ("w1", "w3", "w2")),
        ),
        is_moe_layer=all_sparse,
    ),
    Family(model_types=("deepseek_v2",), attention=MLA, dense=DENSE, moe=DEEPSEEK_MOE, is_moe_layer=deepseek_sparse),
    Family(
        model_types=("deepseek_v3", "kimi_k2"),
        attention=MLA,
        dense=DENSE,
        moe=(*DEEPSEEK_MOE, EXPERT_BIAS),
        is_moe_layer=deepseek_sparse,
    ),
    Family(
        model_types=("glm4_moe",),
        attention=(*ATTENTION, qkv("bias", when=ATTENTION_BIAS), *qk_norms(QK_NORM)),
        dense=DENSE,
        moe=(*DEEPSEEK_MOE, EXPERT_BIAS),
        is_moe_layer=deepseek_sparse,
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
        attention=(*GEMMA2_NORMS, qkv("weight", "hidden"), O_PROJ, *OPTIONAL_BIASES),
        dense=DENSE,
        zero_centered_norms=True,
        tied_by_default=True,
    ),
    Family(
        model_types=("gemma3_text",),
        attention=(*GEMMA2_NORMS, qkv("weight", "hidden"), O_PROJ, *QK_NORMS, *OPTIONAL_BIASES),
        dense=DENSE,
        zero_centered_norms=True,
        tied_by_default=True,
    ),
)
