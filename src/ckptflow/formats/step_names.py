"""Which global step a path is of, and which of a step's models it is, told by the names of directories alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_WORDS = r"(?:global_?step|step|checkpoint|ckpt|iter|iteration)[._=-]?"
# global_step_10, step-10, checkpoint-10, iter_0000010, global_step3, epoch_2-step_10, AReaL's
# epoch0epochstep9globalstep9, xtuner's hf-10; numbers sort as numbers.
STEP_NAME = re.compile(rf"(?:(?:^|[._-]|(?<=\d)(?=global)){_WORDS}|^hf-(?=\d+$))(\d+)")
_WHOLE_STEP_NAME = re.compile(rf"{_WORDS}(\d+)")
# How far above a step 0 the directory of the real step may be: step_5/policy/weights/iter_0000000.
_LEVELS_ABOVE = 3
# What trainers of reinforcement learning call the models that they train at the same time: verl, NeMo-RL, OpenRLHF
# (_actor), ROLL (actor_train); and the average of the weights beside them.
_ROLE = re.compile(
    r"_?(?:model_)?(?P<role>actor|critic|policy|value|ref|reference|reward|ema)(?:_(?:train|model|weights))?"
)
# Directories with a second copy of each step: prime-rl's weights/step_5 beside checkpoints/step_5.
_COPIES = ("weights", "broadcasts")
# Accelerate numbers the models of one save; the first is the usual one.
_NUMBERED = re.compile(r"pytorch_model_fsdp_([1-9]\d*)(?:\.bin)?")
# Directories between the run's and the steps' that name neither; AReaL calls its only model "default".
_BETWEEN = ("checkpoint", "checkpoints", "default", "lightning_logs")
_NUMBERED_RUN = re.compile(r"version_\d+")
# A second copy of a step, beside the first: global_step5_hf, checkpoint-5-merged, hf-5, best_global_step5.
_COPY = re.compile(r"(?P<before>best|hf)[_-].*\d|.*\d[_-](?P<after>[a-z]+)")


def step_index(parts: Sequence[str]) -> int | None:
    """Index of the part of a path that names the global step: the nearest one; None where none does.

    Of ``checkpoint-5/global_step5``, which name it twice, it is the outer one. A step 0 inside another step's directory
    counts nothing: NeMo-RL has Megatron save each of its steps as 0.
    """
    found = [index for index, part in enumerate(parts) if STEP_NAME.search(part)]
    if not found:
        return None
    nearest = found[-1]
    if _number(parts[nearest]) == 0:
        above = [i for i in found[:-1] if nearest - i <= _LEVELS_ABOVE and _WHOLE_STEP_NAME.fullmatch(parts[i])]
        nearest = above[-1] if above else nearest
    while nearest - 1 in found and _number(parts[nearest - 1]) == _number(parts[nearest]):
        nearest -= 1
    return nearest


def global_step_of(path: Path) -> int | None:
    """The step that ``path`` names, as ``step_index`` finds it; None where no part does."""
    index = step_index(path.parts)
    return None if index is None else _number(path.parts[index])


def role_of(path: Path) -> str | None:
    """Which of the models of a step, as ``critic`` or ``actor-hf``; None where there is one, as far as names tell.

    A directory below that of the step, or right above it, is called as the role is; the step's own name may say that
    it is a second copy.
    """
    index = step_index(path.parts)
    if index is None:
        return None
    places = (*path.parts[index + 1 :], path.parts[index - 1])
    role = next((match["role"] for part in places if (match := _ROLE.fullmatch(part))), None)
    copy, number = _COPY.fullmatch(path.parts[index]), _NUMBERED.fullmatch(path.name)
    apart = path.parts[index - 1] if path.parts[index - 1] in _COPIES else None
    words = [role, apart, *(copy.groups() if copy else ()), f"model-{number[1]}" if number else None]
    return "-".join(word for word in words if word) or None


def run_of(parts: Sequence[str], step: int) -> str | None:
    """Name of the run, above the step at index ``step``; None where none is left.

    Lightning numbers the runs of a project, ``lightning_logs/version_0``: the name above belongs to it.
    """
    names = [part for part in parts[1:step] if part not in _BETWEEN]
    above = parts[step - 1]
    if len(names) > 1 and names[-1] == above and (above in _COPIES or _ROLE.fullmatch(above)):
        names.pop()
    if not names:
        return None
    is_numbered = _NUMBERED_RUN.fullmatch(names[-1]) and len(names) > 1
    return "-".join(names[-2:]) if is_numbered else names[-1]


def _number(part: str) -> int | None:
    match = STEP_NAME.search(part)
    return int(match[1]) if match else None
