"""A wrapper's prefix is found from the model's own names and shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptflow.dtypes import DTYPES
from ckptflow.errors import InconsistentCheckpointError, UsageError
from ckptflow.manifest import CheckpointManifest
from ckptflow.tensors import Shape, TensorSource
from ckptflow.transforms.prefix import find_prefix, share_first_part, without_wrapper_prefix

MODEL: dict[str, Shape] = {
    "model.embed_tokens.weight": (8, 4),
    "model.layers.0.mlp.weight": (4, 4),
    "model.norm.weight": (4,),
    "lm_head.weight": (8, 4),
}


def wrapped(prefix: str) -> dict[str, Shape]:
    return {prefix + name: shape for name, shape in MODEL.items()}


@pytest.mark.parametrize("prefix", ["", "model.", "net.model.", "_forward_module.policy.backbone.", "lm_head."])
def test_the_prefix_that_all_names_share_is_found(prefix: str) -> None:
    assert find_prefix({**wrapped(prefix), "ema_count": ()}, MODEL) == prefix


def test_the_model_inside_one_that_repeats_its_own_first_part_is_found() -> None:
    inner: dict[str, Shape] = {"weight": (2, 2), "model.weight": (3, 3)}
    assert find_prefix({f"model.{name}": shape for name, shape in inner.items()}, inner) == "model."


def test_aliases_of_tied_weights_may_be_missing() -> None:
    names = wrapped("model.")
    del names["model.lm_head.weight"]
    assert find_prefix(names, MODEL, frozenset({"lm_head.weight"})) == "model."
    with pytest.raises(InconsistentCheckpointError, match=r"lm_head\.weight"):
        find_prefix(names, MODEL)


def test_two_whole_models_are_refused_with_both_prefixes() -> None:
    with pytest.raises(InconsistentCheckpointError, match=r"'ema\.', 'model\.'"):
        find_prefix({**wrapped("model."), **wrapped("ema.")}, MODEL)


def test_one_wrong_shape_is_named() -> None:
    names = {**wrapped("model."), "model.model.norm.weight": (5,)}
    with pytest.raises(InconsistentCheckpointError, match=r"model\.model\.norm\.weight"):
        find_prefix(names, MODEL)


def test_a_prefix_ends_at_a_dot() -> None:
    with pytest.raises(InconsistentCheckpointError):
        find_prefix({f"my_{name}": shape for name, shape in MODEL.items()}, MODEL)


def test_names_that_share_no_first_part_can_have_no_prefix() -> None:
    assert share_first_part(wrapped("model."))
    assert not share_first_part(MODEL)


def manifest(names: dict[str, Shape], layout: str = "lightning") -> CheckpointManifest:
    float32 = DTYPES["float32"]
    return CheckpointManifest(
        layout=layout,
        path=Path("x.ckpt"),
        tensors={name: TensorSource(shape, float32, ()) for name, shape in names.items()},
        files=(),
        wrapped=True,
    )


def test_without_a_config_names_behind_one_attribute_are_refused() -> None:
    with pytest.raises(UsageError, match="--config"):
        without_wrapper_prefix(manifest({**wrapped("model."), "ema_count": ()}))


def test_without_a_config_a_module_of_its_own_keeps_its_names() -> None:
    own = manifest({"encoder.weight": (2, 2), "decoder.weight": (2, 2)})
    assert without_wrapper_prefix(own) == own
