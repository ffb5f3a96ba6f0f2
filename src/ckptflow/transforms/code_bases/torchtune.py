"""torchtune's names.

Source: torchtune 0.6.1, models/convert_weights.py, models/{qwen2,phi3}/_convert_weights.py, and the rotary embeddings
of its models: Llama's, Mistral's and Gemma's pairs lie side by side (``RotaryPositionalEmbeddings``,
``Llama3ScaledRoPE``), Qwen2's and Phi-3's are halves. Gemma's scales count from one on both sides.

Gemma 2 has no table: torchtune 0.6.1 reads and writes its MLP's norms swapped (models/gemma2/_convert_weights.py takes
``mlp_norm``, which is before the MLP, for post_feedforward_layernorm), and caps another tensor than transformers does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptflow.transforms.code_bases.rules import CodeBase, Family, Refusal, Rule, Seen, flagged, pairs, same

ENDS = (
    same("tok_embeddings.weight", "model.embed_tokens.weight", "vocab", "hidden"),
    same("norm.scale", "model.norm.weight", "hidden"),
)
HEAD = (same("output.weight", "lm_head.weight", "vocab", "hidden"),)
NORMS = (
    same("sa_norm.scale", "input_layernorm.weight", "hidden"),
    same("mlp_norm.scale", "post_attention_layernorm.weight", "hidden"),
)
PAIRED = (
    pairs("attn.q_proj.weight", "self_attn.q_proj.weight", "q", "hidden"),
    pairs("attn.k_proj.weight", "self_attn.k_proj.weight", "kv", "hidden"),
    same("attn.v_proj.weight", "self_attn.v_proj.weight", "kv", "hidden"),
)
HALVED = (
    same("attn.q_proj.weight", "self_attn.q_proj.weight", "q", "hidden"),
    same("attn.k_proj.weight", "self_attn.k_proj.weight", "kv", "hidden"),
    same("attn.v_proj.weight", "self_attn.v_proj.weight", "kv", "hidden"),
    same("attn.q_proj.bias", "self_attn.q_proj.bias", "q"),
    same("attn.k_proj.bias", "self_attn.k_proj.bias", "kv"),
    same("attn.v_proj.bias", "self_attn.v_proj.bias", "kv"),
)
OUT = (same("attn.output_proj.weight", "self_attn.o_proj.weight", "hidden", "attention"),)
DOWN = same("mlp.w2.weight", "mlp.down_proj.weight", "hidden", "ffn")
DENSE = (
    same("mlp.w1.weight", "mlp.gate_proj.weight", "ffn", "hidden"),
    same("mlp.w3.weight", "mlp.up_proj.weight", "ffn", "hidden"),
    DOWN,
)
JOINED_QKV = Rule(
    own=tuple(f"attn.{part}_proj.weight" for part in "qkv"),
    hf=("self_attn.qkv_proj.weight",),
    rows=("q", "kv", "kv"),
    rest=("hidden",),
)
JOINED_MLP = Rule(
    own=("mlp.w1.weight", "mlp.w3.weight"), hf=("mlp.gate_up_proj.weight",), rows=("ffn", "ffn"), rest=("hidden",)
)


def _turns_a_part(seen: Seen) -> bool:
    rope = seen.config.get("rope_parameters")
    inner = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
    return seen.config.get("partial_rotary_factor") not in (None, 1.0) or inner not in (None, 1.0)


PARTIAL = Refusal(
    applies=_turns_a_part,
    what="torchtune's Phi turns all rows of a head, and config.json says that it turns a part of them",
    found="partial_rotary_factor",
    fix="name the directory with the right config.json with --config",
)

TORCHTUNE = CodeBase(
    name="torchtune",
    mark=re.compile(r"(?P<prefix>(?:.+\.)?)layers\.\d+\.sa_norm\.scale"),
    layer="layers.{layer}.",
    families=(
        Family(
            model_types=("llama", "mistral"),
            layer=(*NORMS, *PAIRED, *OUT),
            dense=DENSE,
            ends=ENDS,
            head=HEAD,
            refused=flagged("attention_bias", "mlp_bias"),
        ),
        Family(
            model_types=("gemma",),
            layer=(*NORMS, *PAIRED, *OUT),
            dense=DENSE,
            ends=ENDS,
            head=HEAD,
            tied_by_default=True,
            refused=flagged("attention_bias"),
        ),
        Family(model_types=("qwen2",), layer=(*NORMS, *HALVED, *OUT), dense=DENSE, ends=ENDS, head=HEAD),
        Family(
            model_types=("phi3",),
            layer=(*NORMS, JOINED_QKV, *OUT),
            dense=(JOINED_MLP, DOWN),
            ends=ENDS,
            head=HEAD,
            refused=(PARTIAL,),
        ),
    ),
)
