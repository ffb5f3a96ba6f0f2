"""CUDA itself, only where there is a GPU: pinned memory, full and busy GPUs, and their names."""

from __future__ import annotations

import subprocess
import tempfile
import threading
import warnings
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptflow.dtypes import DTYPES, numpy_dtype
from ckptflow.engine import EngineOptions
from ckptflow.engine import gather as gather_module
from ckptflow.engine.cuda import CudaQueue, visible_gpus
from ckptflow.engine.device import open_casters
from ckptflow.engine.gather import Gatherer
from ckptflow.engine.options import Buffers
from ckptflow.engine.pipeline import NumpyCasters
from ckptflow.engine.sources import SourceFiles
from ckptflow.engine.torch_cast import TorchCasters
from ckptflow.engine.windows import PieceIndex
from ckptflow.errors import DeviceError
from engine_sources import same_bits, store_all, write
from engine_tilings import stored_tensors, write_pieces
from gpu_marks import NO_GPU
from gpu_processes import holder

torch = pytest.importorskip("torch")


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="needs a CUDA device")
class TestCuda:
    def test_buffers_are_pinned_and_the_gpu_casts(self, tmp_path: Path) -> None:
        file = store_all(tmp_path, {"w": np.ones(3_000_000, np.float32)}, "float32", "bfloat16")
        with open_casters(EngineOptions(device="cuda"), file, lambda: None) as (casters, buffers):
            assert isinstance(casters, TorchCasters)
            block = torch.frombuffer(casters.page_buffer(buffers.block_bytes), dtype=torch.uint8)
            scratch = torch.frombuffer(casters.any_caster().buffer(), dtype=torch.uint8)
            assert block.is_pinned()
            assert scratch.is_pinned()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the profiler's own
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                write(file, tmp_path / "out", device="cuda")
            launched = [event.key for event in profile.key_averages()]
        assert any("HtoD (Pinned -> Device)" in key for key in launched)
        assert any("DtoH (Device -> Pinned)" in key for key in launched)
        assert not any("Pageable" in key for key in launched)

    @settings(max_examples=60, deadline=None)
    @given(stored=stored_tensors(), scratch=st.integers(2, 40), gap=st.integers(0, 20))
    def test_any_tiling_is_cast_right(self, stored, scratch: int, gap: int) -> None:  # type: ignore[no-untyped-def]
        values, pieces = stored
        buffers = Buffers(threads=1, ring=3, block_bytes=4096, scratch_bytes=4 * scratch)
        with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch, SourceFiles() as files:
            patch.setattr(gather_module, "_BRIDGED_GAP_BYTES", gap)
            source = write_pieces(Path(name), values, pieces)
            device = torch.device("cuda", 0)
            with TorchCasters(device, buffers, lambda: CudaQueue(device), least_bytes=0) as casters:
                out = np.zeros(values.size, numpy_dtype(DTYPES["bfloat16"]))
                gatherer = Gatherer(files, 4 * scratch, threading.Event(), casters.caster())
                gatherer.fill(out, source, PieceIndex(source), 0, DTYPES["bfloat16"])
        assert same_bits(out, values.reshape(-1).astype(out.dtype))

    def test_a_full_gpu_is_refused_with_what_to_do_and_auto_takes_the_cpu(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ckptflow.engine.device.auto_considers_gpu", lambda *_: True)
        file = store_all(tmp_path, {"w": np.ones(3_000_000, np.float32)}, "float32", "bfloat16")
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1e-6)
        try:
            with pytest.raises(DeviceError, match="memory is full") as caught:
                write(file, tmp_path / "out", device="cuda")
            full = write(file, tmp_path / "out")
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert "--device cpu" in str(caught.value)
        assert full == write(file, tmp_path / "out", device="cpu")

    def test_a_gpu_that_another_process_holds_is_left_to_it_by_auto(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_locks: Path
    ) -> None:
        monkeypatch.setattr("ckptflow.engine.device.auto_considers_gpu", lambda *_: True)
        file = store_all(tmp_path, {"w": np.ones(300_000, np.float32)}, "float32", "bfloat16")
        with ExitStack() as stack:
            for name in visible_gpus():
                stack.enter_context(holder(name))
            with open_casters(EngineOptions(), file, lambda: None) as (casters, _):
                assert isinstance(casters, NumpyCasters)
        with open_casters(EngineOptions(), file, lambda: None) as (casters, _):
            assert isinstance(casters, TorchCasters)

    def test_nvidia_smi_and_torch_name_the_gpus_alike(self) -> None:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
        assert all(uuid in listed for uuid in visible_gpus())

    def test_a_gpu_in_use_is_left_alone_by_auto(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ckptflow.engine.device.auto_considers_gpu", lambda *_: True)
        file = store_all(tmp_path, {"w": np.ones(300_000, np.float32)}, "float32", "bfloat16")
        used = [torch.empty(3 * 10**9, dtype=torch.uint8, device=n) for n in range(torch.cuda.device_count())]
        with open_casters(EngineOptions(), file, lambda: None) as (casters, _):
            assert isinstance(casters, NumpyCasters)
        del used
        torch.cuda.empty_cache()
