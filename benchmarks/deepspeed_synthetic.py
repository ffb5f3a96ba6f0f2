"""Make a synthetic DeepSpeed checkpoint as save_checkpoint leaves it: Llama shapes, Adam's moments beside the masters.

One rank's file is in memory at a time. Structures and classes are those of DeepSpeed 0.19; DeepSpeed isn't needed.

    python benchmarks/deepspeed_synthetic.py OUT --stage 2 --gigabytes 2 [--ranks 4]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from synthetic import config_of, layers_for, llama_shapes

TAG = "global_step10"
POOL = (1 << 24) + 43  # drawing each value anew would take minutes; an odd length keeps neighbours different
SUBGROUP = 10**8  # zero_optimization.sub_group_size of stage 3; DeepSpeed's default is 1e9

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))
from deepspeed_writer import stand_ins  # noqa: E402 - DeepSpeed's classes under their own names


class Values:
    """Weights that can be had from any place on without making those before it."""

    def __init__(self) -> None:
        self.pool = torch.randn(POOL, generator=torch.Generator().manual_seed(1)) * 0.02

    def range(self, begin: int, numel: int) -> Tensor:
        """Elements ``[begin, begin + numel)`` of the endless vector of weights."""
        parts, at = [], begin
        while at < begin + numel:
            start = at % POOL
            parts.append(self.pool[start : min(POOL, start + begin + numel - at)])
            at += len(parts[-1])
        return torch.cat(parts) if parts else torch.zeros(0)


def write_checkpoint(out: Path, stage: int, layers: int, ranks: int) -> None:
    """Write ``OUT/latest`` and the state files of all ranks."""
    shapes = {name: shape for name, (shape, _) in llama_shapes(layers).items()}
    folder = out / TAG
    folder.mkdir(parents=True, exist_ok=True)
    # Trainers give weights of linear layers decay, and vectors none.
    groups = [{n: s for n, s in shapes.items() if len(s) > 1}, {n: s for n, s in shapes.items() if len(s) == 1}]
    values, begins, at = Values(), {}, 0
    for group in groups:
        for name, shape in group.items():
            begins[name] = at
            at += torch.Size(shape).numel()
    if stage == 3:
        _write_stage_3(folder, groups, begins, values, ranks)
    else:
        _write_stage_2(folder, groups, begins, values, ranks)
    (out / "config.json").write_text(json.dumps(config_of(layers)))
    (out / "latest").write_text(TAG)


Groups = list[dict[str, tuple[int, ...]]]


def _write_stage_2(folder: Path, groups: Groups, begins: dict[str, int], values: Values, ranks: int) -> None:
    module = OrderedDict(
        (name, values.range(begins[name], torch.Size(shape).numel()).bfloat16().view(shape))
        for group in groups
        for name, shape in group.items()
    )
    torch.save(_model_states(module, groups, 2, ranks), folder / "mp_rank_00_model_states.pt")
    del module
    for rank in range(ranks):
        masters, mappings, paddings = [], [], []
        with stand_ins() as classes:
            for group in groups:
                used = sum(torch.Size(shape).numel() for shape in group.values())
                size = -(-used // (2 * ranks)) * 2
                here = max(0, min(size, used - rank * size))
                masters.append(values.range(begins[next(iter(group))] + rank * size, here))
                paddings.append(size - here)
                mappings.append(_mapping(group, begins, rank * size, size, classes["fragment_address"]))
            state = {
                "loss_scaler": classes["LossScaler"](),
                "dynamic_loss_scale": False,
                "overflow": False,
                "clip_grad": 1.0,
                "base_optimizer_state": _adam(masters),
                "single_partition_of_fp32_groups": masters,
                "zero_stage": classes["ZeroStageEnum"](2),
                "group_paddings": paddings,
                "partition_count": [ranks] * len(groups),
                "ds_version": "0.19.8",
                "param_slice_mappings": mappings,
            }
            _save_optimizer(folder, rank, state)


def _mapping(group: dict[str, Any], begins: dict[str, int], begin: int, size: int, address: type[Any]) -> Any:
    mapping, first = OrderedDict(), begins[next(iter(group))]
    for name, shape in group.items():
        at = begins[name] - first
        start, stop = max(at, begin), min(at + torch.Size(shape).numel(), begin + size)
        if stop > start:
            mapping[name] = address()
            mapping[name].__dict__.update(numel=stop - start, start=start - begin)
    return mapping


def _write_stage_3(folder: Path, groups: Groups, begins: dict[str, int], values: Values, ranks: int) -> None:
    empty = OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for group in groups for name in group)
    for rank in range(ranks):
        states = _model_states(empty, groups, 3, ranks)
        torch.save(states, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        # A sub-group is closed after the parameter that makes it large enough (stage3.py, _create_fp16_sub_groups).
        masters: list[Tensor] = []
        parts: list[Tensor] = []
        for group in groups:
            for name, shape in group.items():
                numel = torch.Size(shape).numel()
                share = -(-numel // ranks)
                here = max(0, min(share, numel - rank * share))
                parts += [values.range(begins[name] + rank * share, here), torch.zeros(share - here)]
                if sum(part.numel() for part in parts) >= SUBGROUP:
                    masters.append(torch.cat(parts))
                    parts = []
        if parts:
            masters.append(torch.cat(parts))
        del parts
        with stand_ins() as classes:
            state = {
                "zero_stage": classes["ZeroStageEnum"](3),
                "loss_scaler": classes["LossScaler"](),
                "dynamic_loss_scale": False,
                "overflow": False,
                "partition_count": ranks,
                "optimizer_state_dict": _adam(masters),
                "fp32_flat_groups": masters,
            }
            _save_optimizer(folder, rank, state)


def _save_optimizer(folder: Path, rank: int, state: dict[str, Any]) -> None:
    name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"}, folder / name)


def _adam(masters: list[Tensor]) -> dict[str, Any]:
    state = {
        number: {"step": torch.tensor(10.0), "exp_avg": master * 0.1, "exp_avg_sq": master * master}
        for number, master in enumerate(masters)
    }
    return {"state": state, "param_groups": [{"lr": 1e-5, "params": [number]} for number in state]}


def _model_states(module: Any, groups: Groups, stage: int, ranks: int) -> dict[str, Any]:
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in group.items()) for group in groups],
        "frozen_param_shapes": OrderedDict(),
        "shared_params": {},
        "frozen_param_fragments": OrderedDict(),
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": 10,
        "global_samples": 80,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": stage}},
        "ds_version": "0.19.8",
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--stage", type=int, choices=(2, 3), default=2)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="bytes of the fp32 masters, in 1e9")
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    write_checkpoint(arguments.out, arguments.stage, layers_for(arguments.gigabytes), arguments.ranks)


if __name__ == "__main__":
    main()
