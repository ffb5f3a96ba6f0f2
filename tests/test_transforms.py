"""Casting keeps what must stay; ties are written once only where config and values agree."""

from __future__ import annotations

import pytest

from ckptflow.dtypes import dtype_named
from ckptflow.errors import UsageError
from ckptflow.output.sidefiles import with_dtype
from ckptflow.plan import ConsolidationPlan, PlannedTensor, arrange_files
from ckptflow.tensors import SourceFile, whole
from ckptflow.transforms.cast import cast
from ckptflow.transforms.saved_names import use_saved_names
from ckptflow.transforms.ties import resolve_ties

FILE = SourceFile(path="weights", nbytes=1 << 30, mtime_ns=0)


def planned(fqn: str, dtype: str = "float32", shape: tuple[int, ...] = (4, 4)) -> PlannedTensor:
    source = whole(FILE, 0, shape, dtype_named(dtype))
    return PlannedTensor(fqn=fqn, source=source, dtype=source.dtype, source_fqns=(fqn,))


def plan_of(*tensors: PlannedTensor, ties: dict[str, str] | None = None) -> ConsolidationPlan:
    return ConsolidationPlan(tensors=tensors, ties=ties or {})


def dtypes(plan: ConsolidationPlan) -> dict[str, str]:
    return {t.fqn: t.dtype.name for t in plan.tensors}


def test_floats_are_cast_and_everything_else_keeps_its_dtype() -> None:
    plan = plan_of(
        planned("w"),
        planned("half", "float16"),
        planned("ids", "int64"),
        planned("mask", "bool"),
        planned("q", "float8_e4m3fn"),
    )
    assert dtypes(cast(plan, "bfloat16")) == {
        "w": "bfloat16",
        "half": "bfloat16",
        "ids": "int64",
        "mask": "bool",
        "q": "float8_e4m3fn",
    }


@pytest.mark.parametrize(
    "fqn",
    [
        "model.layers.0.mlp.gate.e_score_correction_bias",
        "layers.3.mixer.A_log",
        "layers.3.mixer.D",
        "router.expert_bias",
    ],
)
def test_tensors_that_need_fp32_keep_it_and_the_plan_says_why(fqn: str) -> None:
    tensor = cast(plan_of(planned(fqn)), "bfloat16").tensors[0]
    assert tensor.dtype.name == "float32"
    assert tensor.kept_reason


def test_a_glob_keeps_what_it_matches_and_must_match_something() -> None:
    plan = plan_of(planned("a.norm.weight"), planned("a.proj.weight"))
    assert dtypes(cast(plan, "bfloat16", ("*norm*",))) == {"a.norm.weight": "float32", "a.proj.weight": "bfloat16"}
    with pytest.raises(UsageError, match="matches no tensor"):
        cast(plan, "bfloat16", ("*nrom*",))


def test_source_keeps_every_dtype() -> None:
    plan = plan_of(planned("w"), planned("h", "float16"))
    assert cast(plan, "source") == plan


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_a_head_that_config_ties_is_written_once_and_must_equal_the_embedding() -> None:
    plan = resolve_ties(plan_of(planned(EMBEDDING), planned(HEAD)), {"tie_word_embeddings": True})
    assert [t.fqn for t in plan.tensors] == [EMBEDDING]
    assert plan.ties == {HEAD: EMBEDDING}
    assert [check.fqn for check in plan.equal] == [HEAD]


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": False}])
def test_a_head_that_config_does_not_tie_is_never_dropped(config: dict[str, object]) -> None:
    apart = resolve_ties(plan_of(planned(EMBEDDING), planned(HEAD)), config)
    assert [t.fqn for t in apart.tensors] == [EMBEDDING, HEAD]
    shared = resolve_ties(plan_of(planned(EMBEDDING), ties={HEAD: EMBEDDING}), config)
    assert [t.fqn for t in shared.tensors] == [EMBEDDING, HEAD]
    assert shared.ties == {}


def test_a_nested_text_config_ties_too() -> None:
    config = {"text_config": {"tie_word_embeddings": True}}
    names = ("model.language_model.embed_tokens.weight", "lm_head.weight")
    assert len(resolve_ties(plan_of(*map(planned, names)), config).tensors) == 1


def test_a_text_config_s_default_does_not_tie_what_the_outer_config_keeps_apart() -> None:
    config = {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}
    names = ("model.language_model.embed_tokens.weight", "lm_head.weight")
    plan = resolve_ties(plan_of(*map(planned, names)), config)
    assert [t.fqn for t in plan.tensors] == list(names)
    assert plan.equal == ()


def test_the_embedding_owns_the_tie_whichever_name_the_file_had_first() -> None:
    plan = resolve_ties(plan_of(planned(HEAD), ties={EMBEDDING: HEAD}), {"tie_word_embeddings": True})
    assert [t.fqn for t in plan.tensors] == [EMBEDDING]
    assert plan.ties == {HEAD: EMBEDDING}


@pytest.mark.parametrize(
    ("model_type", "live", "saved"),
    [
        ("qwen2_vl", "model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("qwen2_5_vl", "model.visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qkv.weight"),
        ("llava", "model.language_model.norm.weight", "language_model.model.norm.weight"),
        ("gemma3", "lm_head.weight", "language_model.lm_head.weight"),
        ("llama", "model.norm.weight", "model.norm.weight"),
    ],
)
def test_vision_language_models_get_the_names_that_transformers_saves(model_type: str, live: str, saved: str) -> None:
    config = {"model_type": model_type}
    renamed = use_saved_names(plan_of(planned(live)), config)
    assert [t.fqn for t in renamed.tensors] == [saved]
    assert use_saved_names(renamed, config) == renamed, "names as saved are left alone"


def test_weight_files_respect_the_limit_and_the_order_of_the_model() -> None:
    tensors = [planned(f"layers.{i}.weight") for i in range(5)]  # 64 bytes each
    plan = arrange_files(plan_of(*tensors), max_shard_bytes=130)
    assert [f.name for f in plan.files] == [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    assert [t.fqn for f in plan.files for t in f.tensors] == [t.fqn for t in tensors]
    assert max(f.data_bytes for f in plan.files) <= 130


def test_a_tensor_larger_than_the_limit_gets_its_own_file() -> None:
    plan = arrange_files(plan_of(planned("a"), planned("big", shape=(40, 40)), planned("b")), max_shard_bytes=100)
    assert [[t.fqn for t in f.tensors] for f in plan.files] == [["a"], ["big"], ["b"]]


def test_one_file_has_no_number_and_larger_items_come_first() -> None:
    plan = arrange_files(plan_of(planned("half", "float16"), planned("full")), max_shard_bytes=10**9)
    assert [f.name for f in plan.files] == ["model.safetensors"]
    assert [t.fqn for t in plan.files[0].tensors] == ["full", "half"]


def test_config_says_the_dtype_of_the_weights_in_every_nested_config_but_not_in_quantization() -> None:
    config = {
        "torch_dtype": "float32",
        "text_config": {"dtype": "float32"},
        "quantization_config": {"dtype": "float32"},
    }
    assert with_dtype(config, "bfloat16") == {
        "torch_dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16"},
        "quantization_config": {"dtype": "float32"},
    }
    assert with_dtype({"model_type": "llama"}, "bfloat16")["dtype"] == "bfloat16"
