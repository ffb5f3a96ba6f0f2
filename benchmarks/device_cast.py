"""The same weight file written with ``--device cpu`` and ``--device cuda``: GB/s of float32 read, and CPU seconds.

One process, interleaved; the first round of each device warms up and does not count. The source is in the page cache,
the output is not flushed: the disk is not what is measured. ``cast only`` leaves out hash and output as well: one
thread fills one buffer over and over, as one of the engine's threads does.

    python benchmarks/device_cast.py --gigabytes 4 --rounds 5
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from ckptflow.dtypes import DTYPES, numpy_dtype
from ckptflow.engine import EngineOptions, write_weight_file
from ckptflow.engine.cuda import visible_gpus
from ckptflow.engine.device import open_casters
from ckptflow.engine.gather import Gatherer
from ckptflow.engine.options import Device
from ckptflow.engine.sources import SourceFiles
from ckptflow.engine.windows import PieceIndex
from ckptflow.errors import DeviceError
from ckptflow.plan import PlannedTensor, WeightFile
from ckptflow.tensors import SourceFile, TensorSource, concatenate, whole
from measure import spread

COLUMNS = 4096
FLOAT32, TARGET = DTYPES["float32"], DTYPES["bfloat16"]
Measured = dict[str, list[tuple[float, float]]]


def main() -> None:
    """Command line."""
    arguments = _parse()
    devices: list[Device] = ["cpu", "cuda"]
    try:
        print(f"GPU: {', '.join(visible_gpus())}")
    except DeviceError as error:
        print(f"the CPU alone, since {error.what}: {error.found}")
        devices = ["cpu"]
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        file = _weight_file(Path(name) / "source", arguments.gigabytes)
        gigabytes = sum(tensor.source.nbytes for tensor in file.tensors) / 1e9
        print(f"{gigabytes:.2f} GB of float32 to bfloat16, n = {arguments.rounds}\n")
        print("| device | whole file GB/s | its CPU s | cast only GB/s | its CPU s |\n|---|---|---|---|---|")
        whole_file: Measured = {device: [] for device in devices}
        cast_only: Measured = {device: [] for device in devices}
        sums: set[str] = set()
        for _ in range(arguments.rounds + 1):
            for device in devices:
                options = EngineOptions(device=device, durable=False)
                whole_file[device].append(_timed(partial(_write, file, Path(name) / "out", options, sums)))
                cast_only[device].append(_cast_only(file, options))
        for device in devices:
            cells = [*_cells(whole_file[device][1:], gigabytes), *_cells(cast_only[device][1:], gigabytes)]
            print(f"| {device} | {' | '.join(cells)} |")
        if len(sums) != 1:
            raise SystemExit(f"the devices wrote different files: {sums}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="float32 bytes, in 1e9")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default="/tmp", help="where source and output go")
    return parser.parse_args()


def _weight_file(path: Path, gigabytes: float) -> WeightFile:
    """Half as one run of memory, half as four shards that are cut along dim 1."""
    rows = max(8, int(gigabytes * 1e9) // (4 * COLUMNS) // 8 * 8)
    values = np.random.default_rng(1).standard_normal((8, COLUMNS), np.float32)
    with path.open("wb") as out:
        for _ in range(rows // 8):
            out.write(values.tobytes())
    status = path.stat()
    source = SourceFile(str(path), status.st_size, status.st_mtime_ns)
    half, shard = rows // 2, (rows // 2, COLUMNS // 4)
    begin = half * COLUMNS * 4
    shards = [whole(source, begin + n * begin // 4, shard, FLOAT32) for n in range(4)]
    tensors = {"run": whole(source, 0, (half, COLUMNS), FLOAT32), "dim-1": concatenate(shards, 1)}
    return WeightFile(name="model.safetensors", tensors=tuple(_planned(*item) for item in tensors.items()))


def _planned(fqn: str, source: TensorSource) -> PlannedTensor:
    return PlannedTensor(fqn=fqn, source=source, dtype=TARGET, source_fqns=(fqn,))


def _write(file: WeightFile, path: Path, options: EngineOptions, sums: set[str]) -> None:
    sums.add(write_weight_file(file, path, options).sha256)


def _cast_only(file: WeightFile, options: EngineOptions) -> tuple[float, float]:
    with ExitStack() as stack:
        casters, buffers = stack.enter_context(open_casters(options, file, lambda: None))
        files = stack.enter_context(SourceFiles())
        gatherer = Gatherer(files, buffers.scratch_bytes, threading.Event(), casters.caster())
        out = np.frombuffer(casters.page_buffer(buffers.block_bytes), numpy_dtype(TARGET))

        def fill_all() -> None:
            for tensor in file.tensors:
                index = PieceIndex(tensor.source)
                for start in range(0, tensor.source.numel, out.size):
                    count = min(out.size, tensor.source.numel - start)
                    gatherer.fill(out[:count], tensor.source, index, start, TARGET)

        return _timed(fill_all)


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def _cells(measured: list[tuple[float, float]], gigabytes: float) -> list[str]:
    return [spread([gigabytes / wall for wall, _ in measured]), spread([cpu for _, cpu in measured])]


if __name__ == "__main__":
    main()
