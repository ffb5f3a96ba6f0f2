"""Writes DeepSpeed's folders of two tensor-parallel ranks, experts and pipelines, and its universal checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from deepspeed_writer import model_states, optim_states, parameters, write_zero2, write_zero3

MODEL = {
    "embed.weight": (6, 4),
    "q.weight": (8, 4),
    "q.bias": (8,),
    "o.weight": (4, 8),
    "o.bias": (4,),
    "norm.weight": (4,),
    "head.weight": (6, 4),
}
ROW = [r"^o\.weight$", r"^o\.bias$"]
COPIED = [r"^embed\.weight$", r"^norm\.weight$"]
INFO = {
    "universal_checkpoint_version": 0.4,
    "parameter_with_row_parallelism_patterns": ROW,
    "tp_replicated_parameter_patterns": COPIED,
    "vocabulary_parameter_patterns": [r"^head\.weight$"],
    "original_vocab_size": 6,
    "parameter_with_sub_params": [],
}


def cut(name: str, tensor: Tensor, rank: int, ranks: int = 2) -> Tensor:
    """What one tensor-parallel rank holds of a tensor of ``MODEL``."""
    if name in ("embed.weight", "norm.weight", "o.bias"):
        return tensor
    return tensor.chunk(ranks, 1 if name == "o.weight" else 0)[rank].contiguous()


def write_tensor_parallel(save: Path, values: Mapping[str, Tensor], dp: int, info: object) -> Path:
    """ZeRO 2 of two tensor-parallel ranks; ``info`` is their ``universal_checkpoint_info``."""
    for rank in range(2):
        mine = {name: cut(name, tensor, rank) for name, tensor in values.items()}
        model = {"mp_world_size": 2} | ({} if info is None else {"universal_checkpoint_info": info})
        write_zero2(save, [mine], dp, mp=rank, model=model)
    return save / "global_step7"


DENSE = {"embed.weight": (5, 3), "layers.0.moe.deepspeed_moe.gate.wg.weight": (4, 3)}


def expert_name(layer: int, expert: int, name: str) -> str:
    """The FQN of a tensor of one expert."""
    return f"layers.{layer}.moe.deepspeed_moe.experts.deepspeed_experts.{expert}.{name}"


def expert_weights(experts: Mapping[int, int]) -> dict[str, Tensor]:
    """Two tensors for each expert; ``experts``: how many each layer has."""
    shapes = {"w": (3, 5), "b": (3,)}
    return parameters(
        {
            expert_name(n, e, name): shape
            for n, count in experts.items()
            for e in range(count)
            for name, shape in shapes.items()
        },
        seed=1,
    )


def write_expert_files(folder: Path, values: Mapping[str, Tensor], experts: Mapping[int, int]) -> None:
    """A file for each expert."""
    for layer, expert in ((layer, e) for layer, count in experts.items() for e in range(count)):
        mine = {name: t for name, t in values.items() if name.startswith(expert_name(layer, expert, ""))}
        torch.save(mine, folder / f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt")


def write_experts(save: Path, experts: Mapping[int, int], *, world: int, ep: int) -> dict[str, Tensor]:
    """ZeRO 1 of a mixture, whose experts ``ep`` groups of ranks share; gives what it holds.

    ``experts``: how many each layer has, over all ranks.
    """
    dense, weights = parameters(DENSE), expert_weights(experts)

    def held_by(rank: int) -> dict[str, Tensor]:
        held = {}
        for layer, count in experts.items():
            local = count // ep
            for i, name in ((i, name) for i in range(local) for name in ("w", "b")):
                held[expert_name(layer, i, name)] = weights[expert_name(layer, rank % ep * local + i, name)]
        return held

    folder = save / "t"
    counts = list(experts.values())
    path = folder / "mp_rank_00_model_states.pt"
    model_states(path, dense, [dense, held_by(0)], world=world, stage=1, num_experts=counts)
    for rank in range(world):
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        optim_states(path, rank, [dense, held_by(rank)], world=world, stage=1, counts=[world, world // ep])
    write_expert_files(folder, weights, experts)
    (save / "latest").write_text("t")
    return {**dense, **weights}


LAYERS = {0: {"weight": (6, 4)}, 1: {"w": (4, 4), "b": (4,)}, 3: {"w": (4, 4), "b": (4,)}, 4: {"weight": (6, 4)}}


def write_pipeline(
    save: Path, *, zero: bool, dtype: torch.dtype = torch.float32, named_by_shapes: bool = True
) -> dict[str, Tensor]:
    """Two stages of two layers each, with ZeRO 1 or without ZeRO; gives what they hold.

    With ``zero`` and not ``named_by_shapes`` as BF16_Optimizer does it without ZeRO: fragments alone name parameters.
    """
    values = {n: parameters(shapes, seed=n) for n, shapes in LAYERS.items()}
    folder = save / "t"
    for stage, layers in enumerate(((0, 1), (3, 4))):
        named = {f"{n}.{name}": t for n in layers for name, t in values[n].items()}
        optimizer = None if zero else {"state": {}, "param_groups": [{"params": list(range(len(named)))}]}
        model_states(
            folder / f"mp_rank_{stage:02d}_model_states.pt",
            None,
            [named] if zero and named_by_shapes else None,
            world=2 if zero else 1,
            stage=int(zero and named_by_shapes),
            optimizer=optimizer,
            mp_world_size=2,
        )
        for rank in range(2 if zero else 0):
            path = folder / f"zero_pp_rank_{rank}_mp_rank_{stage:02d}_optim_states.pt"
            optim_states(path, rank, [named], world=2, stage=1)
    for n, layer in values.items():
        torch.save({name: t.to(dtype) for name, t in layer.items()}, folder / f"layer_{n:02d}-model_states.pt")
    (save / "latest").write_text("t")
    return {f"{n}.{name}": t for n, layer in values.items() for name, t in layer.items()}


def write_universal(
    save: Path,
    values: Mapping[str, Tensor],
    *,
    flat: bool,
    frozen: Mapping[str, Tensor] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> Path:
    """A folder for each parameter, of ZeRO 3 (``flat``, maybe with frozen parameters) or ZeRO 2 (with buffers).

    From ZeRO 2 buffers are there, too, as fp32; from ZeRO 3 frozen parameters are not.
    """
    if flat:
        folder = write_zero3(save, [values], 2, frozen=frozen)
    else:
        module = {**{n: t.bfloat16() for n, t in values.items()}, **(buffers or {})}
        folder = write_zero2(save, [values], 2, module=module, model={"buffer_names": list(buffers or {})})
        for name, tensor in (buffers or {}).items():
            (folder / "zero" / name).mkdir(parents=True)
            torch.save({"param": tensor.float()}, folder / "zero" / name / "fp32.pt")
    (save / "latest").unlink()
    for path in folder.glob("*optim_states.pt"):
        path.unlink()
    for name, tensor in values.items():
        place = folder / "zero" / name
        place.mkdir(parents=True)
        torch.save(tensor.reshape(-1) if flat else {"param": tensor, "cat_dim": 0}, place / "fp32.pt")
        torch.save(torch.full_like(tensor, torch.nan), place / "exp_avg.pt")
    torch.save({"fp32_flat_groups": []}, folder / "zero" / "optimizer_state.pt")
    (save / "latest_universal").write_text(folder.name)
    return folder
