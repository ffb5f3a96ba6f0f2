"""Whether renamed tensors are the whole model that transformers builds from config.json."""

from __future__ import annotations

from pathlib import Path

from ckptflow.errors import InconsistentCheckpointError, VerificationError
from ckptflow.plan import ConsolidationPlan


def check_whole_model(plan: ConsolidationPlan, config_dir: Path, path: Path) -> None:
    """Hold names and shapes to transformers' own; where it can't tell, the tables alone count.

    Args:
        plan: tensors under transformers' names.
        config_dir: directory with config.json.
        path: the checkpoint, for messages.

    Raises:
        InconsistentCheckpointError: a tensor is missing, is one too many, or has another shape.
    """
    from ckptflow.validate.skeleton import describe_model

    try:
        skeleton = describe_model(config_dir)
    except VerificationError:
        return  # verify asks again, and says so
    if not skeleton.shapes:
        return
    found = {tensor.fqn: tensor.shape for tensor in plan.tensors}
    tied = {*plan.ties, *skeleton.tied}
    wrong = [
        (fqn, skeleton.shapes.get(fqn), found.get(fqn))
        for fqn in {**skeleton.shapes, **found}
        if skeleton.shapes.get(fqn) != found.get(fqn) and not (fqn in tied and fqn not in found)
    ]
    if wrong:
        fqn, expected, got = wrong[0]
        raise InconsistentCheckpointError(
            "the tensors of another code base don't make up the model that config.json describes",
            file=path,
            tensor=fqn,
            expected=_shape(expected),
            found=f"{_shape(got)}; {len(wrong)} tensors differ",
            fix="name the directory with the right config.json with --config",
        )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no such tensor" if shape is None else f"shape {list(shape)}"
