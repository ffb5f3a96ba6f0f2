"""litgpt's names.

Source: litgpt 0.5.13 and 0.5.4, scripts/convert_lit_checkpoint.py and model.py. Rotary pairs are halves, as in
transformers. q, k and v are one matrix, ``attn.qkv``, one after another; in 0.5.4 and before it was ``attn.attn``, with
query groups of [q…, k, v] (``CausalSelfAttention._load_from_state_dict``). Gemma's norms count from one on both sides.
``rope_interleave`` of litgpt's config puts pairs side by side, which no model does that litgpt comes with.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ckptflow.transforms.code_bases.rules import CodeBase, Family, Order, Refusal, Rule, Seen, flagged, same
from ckptflow.transforms.sparse_layers import all_sparse, qwen_sparse

ENDS = (
    same("transformer.wte.weight", "model.embed_tokens.weight", "vocab", "hidden"),
    same("transformer.ln_f.weight", "model.norm.weight", "hidden"),
)
HEAD = (same("lm_head.weight", "lm_head.weight", "vocab", "hidden"),)
INPUT_NORM = same("norm_1.weight", "input_layernorm.weight", "hidden")
NORMS = (INPUT_NORM, same("norm_2.weight", "post_attention_layernorm.weight", "hidden"))
SANDWICHED = (
    INPUT_NORM,
    same("post_attention_norm.weight", "post_attention_layernorm.weight", "hidden"),
    same("norm_2.weight", "pre_feedforward_layernorm.weight", "hidden"),
    same("post_mlp_norm.weight", "post_feedforward_layernorm.weight", "hidden"),
)
HEAD_NORMS = (
    same("attn.norm_q.weight", "self_attn.q_norm.weight", "head"),
    same("attn.norm_k.weight", "self_attn.k_norm.weight", "head"),
)
OUT = same("attn.proj.weight", "self_attn.o_proj.weight", "hidden", "attention")
DOWN = same("mlp.proj.weight", "mlp.down_proj.weight", "hidden", "ffn")
DENSE = (
    same("mlp.fc_1.weight", "mlp.gate_proj.weight", "ffn", "hidden"),
    same("mlp.fc_2.weight", "mlp.up_proj.weight", "ffn", "hidden"),
    DOWN,
)
JOINED_MLP = Rule(
    own=("mlp.fc_1.weight", "mlp.fc_2.weight"), hf=("mlp.gate_up_proj.weight",), rows=("ffn", "ffn"), rest=("hidden",)
)


MODEL_YAML = "model_config.yaml"
MAX_YAML_BYTES = 1 << 16


def _interleaves(seen: Seen) -> bool:
    """Whether litgpt's own config says so; litgpt leaves it beside lit_model.pth."""
    yaml = (seen.path if seen.path.is_dir() else seen.path.parent) / MODEL_YAML
    if not yaml.is_file():
        return False
    with open(yaml, "rb") as file:
        text = file.read(MAX_YAML_BYTES)
    return re.search(rb"^rope_interleave:\s*true\b", text, re.MULTILINE | re.IGNORECASE) is not None


INTERLEAVED = Refusal(
    applies=_interleaves,
    what="a model of litgpt's whose rotary pairs lie side by side: litgpt's own exporter takes them for halves",
    found=f"rope_interleave: true in {MODEL_YAML}",
    fix="train with rope_interleave: false",
)


def experts(hf: str, names: tuple[str, str, str]) -> tuple[Rule, ...]:
    """A router, and three matrices for each expert."""
    gate, up, down = (f"{hf}.experts.{{expert}}.{name}.weight" for name in names)
    return (
        same("mlp.gate.weight", f"{hf}.gate.weight", "experts", "hidden"),
        same("mlp.experts.{expert}.fc_1.weight", gate, "expert_ffn", "hidden"),
        same("mlp.experts.{expert}.fc_2.weight", up, "expert_ffn", "hidden"),
        same("mlp.experts.{expert}.proj.weight", down, "hidden", "expert_ffn"),
    )


def _cut_qkv(own: str, order: Order) -> Callable[..., Rule]:
    def rule(suffix: str, *rest: str) -> Rule:
        parts = tuple(f"self_attn.{part}_proj.{suffix}" for part in "qkv")
        return Rule(own=(f"{own}.{suffix}",), hf=parts, rows=("q", "kv", "kv"), rest=rest, order=order)

    return rule


def _biased_norm(own: str, hf: str) -> tuple[Rule, Rule]:
    return same(f"{own}.weight", f"{hf}.weight", "hidden"), same(f"{own}.bias", f"{hf}.bias", "hidden")


def _biased(own: str, hf: str, out: str, into: str) -> tuple[Rule, Rule]:
    return same(f"{own}.weight", f"{hf}.weight", out, into), same(f"{own}.bias", f"{hf}.bias", out)


def _neox(own: str, order: Order) -> Family:
    """Pythia. transformers holds query groups, as litgpt's older versions."""
    fused = "attention.query_key_value"
    return Family(
        model_types=("gpt_neox",),
        layer=(
            *_biased_norm("norm_1", "input_layernorm"),
            *_biased_norm("norm_2", "post_attention_layernorm"),
            Rule(own=(f"{own}.weight",), hf=(f"{fused}.weight",), rows=("qkv",), rest=("hidden",), order=order),
            Rule(own=(f"{own}.bias",), hf=(f"{fused}.bias",), rows=("qkv",), order=order),
            *_biased("attn.proj", "attention.dense", "hidden", "attention"),
        ),
        dense=(
            *_biased("mlp.fc", "mlp.dense_h_to_4h", "ffn", "hidden"),
            *_biased("mlp.proj", "mlp.dense_4h_to_h", "hidden", "ffn"),
        ),
        ends=(
            same("transformer.wte.weight", "gpt_neox.embed_in.weight", "vocab", "hidden"),
            *_biased_norm("transformer.ln_f", "gpt_neox.final_layer_norm"),
        ),
        head=(same("lm_head.weight", "embed_out.weight", "vocab", "hidden"),),
        embedding="gpt_neox.embed_in.weight",
        refused=(INTERLEAVED,),
        hf_layer="gpt_neox.layers.{layer}.",
    )


def _phi(qkv: Callable[..., Rule]) -> Family:
    """Phi-1.5 and Phi-2: one norm for attention and MLP, biases everywhere."""
    return Family(
        model_types=("phi",),
        layer=(
            *_biased_norm("norm_1", "input_layernorm"),
            qkv("weight", "hidden"),
            qkv("bias"),
            *_biased("attn.proj", "self_attn.dense", "hidden", "attention"),
        ),
        dense=(*_biased("mlp.fc", "mlp.fc1", "ffn", "hidden"), *_biased("mlp.proj", "mlp.fc2", "hidden", "ffn")),
        ends=(ENDS[0], *_biased_norm("transformer.ln_f", "model.final_layernorm")),
        head=(*HEAD, same("lm_head.bias", "lm_head.bias", "vocab")),
        refused=(*flagged("qk_layernorm"), INTERLEAVED),
    )


def _families(own: str, order: Order) -> tuple[Family, ...]:
    """The tables for one order of the fused matrix, whose module is ``own``; older versions have fewer families."""
    qkv = _cut_qkv(own, order)
    weights = qkv("weight", "hidden")
    joined = Rule(
        own=(f"{own}.weight",), hf=("self_attn.qkv_proj.weight",), rows=("qkv",), rest=("hidden",), order=order
    )

    def family(*kinds: str, layer: tuple[Rule, ...], tied: bool = False, **own: object) -> Family:
        fields = {"layer": (*layer, OUT), "dense": DENSE, "ends": ENDS, "head": HEAD, "tied_by_default": tied}
        fields |= {"refused": (INTERLEAVED,), **own}
        return Family(model_types=kinds, **fields)  # type: ignore[arg-type]

    plain = (*flagged("attention_bias", "mlp_bias"), INTERLEAVED)
    old = (
        family("llama", "mistral", layer=(*NORMS, weights), refused=plain),
        family(
            "mixtral",
            layer=(*NORMS, weights),
            dense=(),
            moe=experts("block_sparse_moe", ("w1", "w3", "w2")),
            is_sparse=all_sparse,
        ),
        family("qwen2", layer=(*NORMS, weights, qkv("bias"))),
        family("gemma", layer=(*NORMS, weights), tied=True, refused=plain),
        family("gemma2", layer=(*SANDWICHED, weights), tied=True, refused=plain),
        family("phi3", layer=(*NORMS, joined), dense=(JOINED_MLP, DOWN)),
        _phi(qkv),
        _neox(own, "to groups" if order == "kept" else "kept"),
    )
    if order == "groups":
        return old
    return (
        *old,
        family(
            "qwen3",
            "qwen3_moe",
            layer=(*NORMS, weights, *HEAD_NORMS),
            moe=experts("mlp", ("gate_proj", "up_proj", "down_proj")),
            is_sparse=qwen_sparse,
            refused=plain,
        ),
        family("gemma3_text", layer=(*SANDWICHED, weights, *HEAD_NORMS), tied=True, refused=plain),
    )


def _code_base(name: str, module: str, order: Order) -> CodeBase:
    return CodeBase(
        name=name,
        mark=re.compile(rf"(?P<prefix>(?:.+\.)?)transformer\.h\.\d+\.{re.escape(module)}\.weight"),
        layer="transformer.h.{layer}.",
        families=_families(module, order),
        left_out=((re.compile(r"^(?:cos|sin|mask_cache)$"), "computed from the config"),),
    )


LITGPT = _code_base("litgpt", "attn.qkv", "kept")
OLD_LITGPT = _code_base("older versions of litgpt", "attn.attn", "groups")
