"""Make a DCP checkpoint with optimizer as torch itself writes it: real processes, FSDP2's placements, Llama shapes.

python benchmarks/dcp_synthetic.py OUT --gigabytes 2 [--ranks 4]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from synthetic import config_of, layers_for, llama_shapes


def write_checkpoint(out: Path, layers: int, ranks: int) -> None:
    """Write ``OUT`` (``step-10`` by custom) with ``model`` and ``optim``, and ``config.json``."""
    out.mkdir(parents=True)
    with tempfile.NamedTemporaryFile() as store:
        mp.spawn(_save, (str(out), layers, ranks, f"file://{store.name}-store"), nprocs=ranks)
    (out / "config.json").write_text(json.dumps(config_of(layers)))


def _save(rank: int, out: str, layers: int, ranks: int, store: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    generator = torch.Generator().manual_seed(rank)
    model, moments = {}, {}
    for name, (shape, _) in llama_shapes(layers).items():
        rows = [len(part) for part in torch.arange(shape[0]).chunk(ranks)] + [0] * ranks
        local = torch.randn((rows[rank], *shape[1:]), generator=generator) * 0.02

        def sharded(values: torch.Tensor, shape: tuple[int, ...] = shape) -> DTensor:
            stride = torch.empty(shape, device="meta").stride()
            return DTensor.from_local(values, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

        model[name] = sharded(local)
        moments[name] = {
            "exp_avg": sharded(local * 0.1),
            "exp_avg_sq": sharded(local * local),
            "step": torch.tensor(10.0),
        }
    dcp.save({"model": model, "optim": {"state": moments, "param_groups": [{"lr": 1e-5}]}}, checkpoint_id=out)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="bytes of the fp32 weights, in 1e9")
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    write_checkpoint(arguments.out, layers_for(arguments.gigabytes), arguments.ranks)


if __name__ == "__main__":
    main()
