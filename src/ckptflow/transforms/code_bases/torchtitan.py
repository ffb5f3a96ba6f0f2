"""torchtitan's names, and Meta's for Llama, which torchtitan's were until 0.2.

Sources: torchtitan 0.3.0 and 0.2.2, state_dict_adapter.py of llama3, qwen3 and deepseek_v3, and models/common/rope.py.
Llama's rotary pairs lie side by side (``ComplexRoPE``), which the adapter takes for granted; Qwen3's are halves
(``CosSinRoPE``). DeepSeek-V3's lie side by side in transformers, too, where ``rope_interleave`` is true, its default.
Experts are stacked as [experts, out, in]. Meta's own files differ in ``rope.freqs`` alone.
"""

from __future__ import annotations

import re

from ckptflow.transforms.code_bases.rules import CodeBase, Family, Refusal, Seen, flagged, pairs, same, stacked
from ckptflow.transforms.model_dims import Config
from ckptflow.transforms.sparse_layers import deepseek_sparse, qwen_sparse

ENDS = (
    same("tok_embeddings.weight", "model.embed_tokens.weight", "vocab", "hidden"),
    same("norm.weight", "model.norm.weight", "hidden"),
)
HEAD = (same("output.weight", "lm_head.weight", "vocab", "hidden"),)
NORMS = (
    same("attention_norm.weight", "input_layernorm.weight", "hidden"),
    same("ffn_norm.weight", "post_attention_layernorm.weight", "hidden"),
)
VALUES = (
    same("attention.wv.weight", "self_attn.v_proj.weight", "kv", "hidden"),
    same("attention.wo.weight", "self_attn.o_proj.weight", "hidden", "attention"),
)
DENSE = (
    same("feed_forward.w1.weight", "mlp.gate_proj.weight", "ffn", "hidden"),
    same("feed_forward.w3.weight", "mlp.up_proj.weight", "ffn", "hidden"),
    same("feed_forward.w2.weight", "mlp.down_proj.weight", "hidden", "ffn"),
)
MOE = (
    same("moe.router.gate.weight", "mlp.gate.weight", "experts", "hidden"),
    stacked("moe.experts.w1", "mlp.experts.{expert}.gate_proj.weight", "expert_ffn", "hidden"),
    stacked("moe.experts.w3", "mlp.experts.{expert}.up_proj.weight", "expert_ffn", "hidden"),
    stacked("moe.experts.w2", "mlp.experts.{expert}.down_proj.weight", "hidden", "expert_ffn"),
)
SHARED = (
    same("moe.shared_experts.w1.weight", "mlp.shared_experts.gate_proj.weight", "shared_ffn", "hidden"),
    same("moe.shared_experts.w3.weight", "mlp.shared_experts.up_proj.weight", "shared_ffn", "hidden"),
    same("moe.shared_experts.w2.weight", "mlp.shared_experts.down_proj.weight", "hidden", "shared_ffn"),
    same("moe.expert_bias", "mlp.gate.e_score_correction_bias", "experts"),
)


def _full_q(config: Config) -> bool:
    return config.get("q_lora_rank") is None


def _low_rank_q(config: Config) -> bool:
    return not _full_q(config)


LATENT = (
    same("attention.wq.weight", "self_attn.q_proj.weight", "q_up", "hidden", when=_full_q),
    same("attention.wq_a.weight", "self_attn.q_a_proj.weight", "q_rank", "hidden", when=_low_rank_q),
    same("attention.q_norm.weight", "self_attn.q_a_layernorm.weight", "q_rank", when=_low_rank_q),
    same("attention.wq_b.weight", "self_attn.q_b_proj.weight", "q_up", "q_rank", when=_low_rank_q),
    same("attention.wkv_a.weight", "self_attn.kv_a_proj_with_mqa.weight", "kv_down", "hidden"),
    same("attention.kv_norm.weight", "self_attn.kv_a_layernorm.weight", "kv_rank"),
    same("attention.wkv_b.weight", "self_attn.kv_b_proj.weight", "kv_up", "kv_rank"),
    same("attention.wo.weight", "self_attn.o_proj.weight", "hidden", "attention"),
)


def _unsaid_and_square(seen: Seen) -> bool:
    width = seen.config.get("moe_intermediate_size")
    return width == seen.config.get("hidden_size") and any(name.endswith(".moe.experts.w1") for name in seen.names)


# Experts of 2025's first versions were stored [experts, in, out], under the names of the later ones.
TRANSPOSED = Refusal(
    applies=_unsaid_and_square,
    what="experts are square: their shape doesn't tell whether a first version of torchtitan stored them turned",
    found="moe_intermediate_size equal to hidden_size, and names of torchtitan before 0.3",
    fix="let torchtitan export the model to Hugging Face's names (last_save_in_hf)",
)
HALVED = Refusal(
    applies=lambda seen: seen.config.get("rope_interleave") is False,
    what="torchtitan's rotary pairs lie side by side, and config.json says that they don't",
    found="rope_interleave: false",
    fix="set rope_interleave to true in config.json, transformers' default",
)

TORCHTITAN = CodeBase(
    name="torchtitan or Meta's Llama",
    mark=re.compile(r"(?P<prefix>(?:.+\.)?)layers\.\d+\.attention\.(?:(?:qkv_linear\.)?wq|wkv_a)\.weight"),
    layer="layers.{layer}.",
    families=(
        Family(
            model_types=("llama",),
            layer=(
                *NORMS,
                pairs("attention.wq.weight", "self_attn.q_proj.weight", "q", "hidden"),
                pairs("attention.wk.weight", "self_attn.k_proj.weight", "kv", "hidden"),
                *VALUES,
            ),
            dense=DENSE,
            ends=ENDS,
            head=HEAD,
            refused=flagged("attention_bias", "mlp_bias"),
        ),
        Family(
            model_types=("qwen3", "qwen3_moe"),
            layer=(
                *NORMS,
                same("attention.wq.weight", "self_attn.q_proj.weight", "q", "hidden"),
                same("attention.wk.weight", "self_attn.k_proj.weight", "kv", "hidden"),
                same("attention.q_norm.weight", "self_attn.q_norm.weight", "head"),
                same("attention.k_norm.weight", "self_attn.k_norm.weight", "head"),
                *VALUES,
            ),
            dense=DENSE,
            moe=MOE,
            ends=ENDS,
            head=HEAD,
            is_sparse=qwen_sparse,
            refused=(*flagged("attention_bias"), TRANSPOSED),
            balancing="moe.expert_bias",
        ),
        Family(
            model_types=("deepseek_v3",),
            layer=(*NORMS, *LATENT),
            dense=DENSE,
            moe=(*MOE, *SHARED),
            ends=ENDS,
            head=HEAD,
            is_sparse=deepseek_sparse,
            refused=(*flagged("attention_bias"), TRANSPOSED, HALVED),
        ),
    ),
    spellings=(
        (".attention.qkv_linear.", ".attention."),
        (".moe.routed_experts.inner_experts.w1_EFD", ".moe.experts.w1"),
        (".moe.routed_experts.inner_experts.w2_EDF", ".moe.experts.w2"),
        (".moe.routed_experts.inner_experts.w3_EFD", ".moe.experts.w3"),
        (".moe.expert_bias_E", ".moe.expert_bias"),
        ("lm_head.weight", "output.weight"),
    ),
    left_out=(
        (re.compile(r"(?:^|\.)(?:freqs_cis|rope_cache|rope\.freqs|rope\.cache)$"), "computed from the config"),
        (re.compile(r"\.tokens_per_expert(?:_E)?$"), "a counter of training"),
        (re.compile(r"^mtp_layers\."), "multi-token prediction head, which transformers leaves out"),
    ),
)
