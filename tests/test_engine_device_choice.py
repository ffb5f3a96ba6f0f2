"""Where the engine casts: ``--device auto`` takes a GPU for large jobs only, ``--device cuda`` one or none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from ckptflow.cli.main import main
from ckptflow.conversion import plan_conversion
from ckptflow.engine import EngineOptions
from ckptflow.engine.cuda import idle_gpus, visible_gpus
from ckptflow.engine.device import AUTO_LEAST_CAST_BYTES, auto_considers_gpu, open_casters
from ckptflow.engine.options import cast_bytes
from ckptflow.engine.pipeline import NumpyCasters
from ckptflow.errors import DeviceError
from ckptflow.request import ConvertRequest
from engine_sources import base_of, planned, random_fold, store_all, weight_file
from gpu_marks import only_without_gpu
from gpu_processes import python


def test_auto_wants_a_large_job_a_device_and_something_to_cast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    dev = tmp_path / "dev"
    dev.mkdir()
    cast = store_all(tmp_path, {"w": np.ones((8, 6), np.float32)}, "float32", "bfloat16")
    copied = store_all(tmp_path, {"w": np.ones((8, 6), np.float32)}, "float32")
    large = EngineOptions(cast_bytes=AUTO_LEAST_CAST_BYTES)
    assert not auto_considers_gpu(large, cast, dev)
    (dev / "nvidiactl").touch()
    assert not auto_considers_gpu(large, cast, dev)
    (dev / "nvidia3").touch()
    assert auto_considers_gpu(large, cast, dev)
    assert not auto_considers_gpu(EngineOptions(cast_bytes=AUTO_LEAST_CAST_BYTES - 1), cast, dev)
    assert not auto_considers_gpu(EngineOptions(), cast, dev)
    assert not auto_considers_gpu(large, copied, dev)
    fold = random_fold(tmp_path, 8, 6, dora=False, transposed=False)
    folded = weight_file(planned("w", base_of(tmp_path, 8, 6)[1], "bfloat16", fold=fold), *cast.tensors)
    assert not auto_considers_gpu(large, folded, dev)
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not auto_considers_gpu(large, cast, dev)


def test_what_a_device_can_take_over_is_counted_in_bytes_of_the_source(tmp_path: Path) -> None:
    cast = store_all(tmp_path, {"a": np.ones(10, np.float32), "b": np.ones(5, np.float32)}, "float32", "bfloat16")
    copied = store_all(tmp_path, {"c": np.ones(7, np.float32)}, "float32")
    fold = random_fold(tmp_path, 8, 6, dora=False, transposed=False)
    folded = planned("w", base_of(tmp_path, 8, 6)[1], "bfloat16", fold=fold)
    assert cast_bytes([*cast.tensors, *copied.tensors, folded]) == 60


def test_auto_is_told_how_much_the_whole_conversion_casts(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "model").mkdir()
    tensors = {name: np.ones((64, 64), np.float32) for name in ("a", "b", "c")}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    request = ConvertRequest(path=tmp_path / "model", out=tmp_path / "out", max_shard_bytes=2 * 64 * 64)
    conversion = plan_conversion(request)
    assert len(conversion.plan.files) == 3
    assert conversion.engine_options.cast_bytes == 3 * 4 * 64 * 64


CONVERT_WITHOUT_TORCH = """
import sys
import numpy as np
from pathlib import Path
from ckptflow.dtypes import DTYPES
from ckptflow.engine import EngineOptions, write_weight_file
from engine_sources import store_all
directory = Path(sys.argv[1])
file = store_all(directory, {"w": np.ones(100_000, np.float32)}, "float32", "bfloat16")
write_weight_file(file, directory / "out", EngineOptions(device=sys.argv[2], cast_bytes=int(sys.argv[3])))
print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("device", "job_bytes", "hidden"), [("cpu", 10**12, False), ("auto", 10**9, False), ("auto", 10**12, True)]
)
def test_the_cpu_casts_without_torch(tmp_path: Path, device: str, job_bytes: int, hidden: bool) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": ""} if hidden else {}
    output, errors = python(CONVERT_WITHOUT_TORCH, tmp_path, device, job_bytes, **environment).communicate()
    assert (output.strip(), errors) == ("False", "")


SMI = """#!/bin/sh
cat <<'END'
GPU-11111111-2222-3333-4444-555555555555, 4
GPU-AAAAAAAA-2222-3333-4444-555555555555, 1907
GPU-bbbbbbbb-2222-3333-4444-555555555555, 1908
GPU-cccccccc-2222-3333-4444-555555555555, [N/A]
END
exit $STATUS
"""


def test_a_gpu_with_little_memory_in_use_is_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STATUS", "0")
    assert idle_gpus() == {"11111111-2222-3333-4444-555555555555", "aaaaaaaa-2222-3333-4444-555555555555"}
    monkeypatch.setenv("STATUS", "9")  # it can't talk to the driver
    assert idle_gpus() == set()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert idle_gpus() == set()


@only_without_gpu
def test_auto_goes_on_where_torch_sees_no_gpu_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ckptflow.engine.device.auto_considers_gpu", lambda *_: True)
    monkeypatch.setattr("ckptflow.engine.device.idle_gpus", lambda: {"11111111-2222-3333-4444-555555555555"})
    file = store_all(tmp_path, {"w": np.ones(100, np.float32)}, "float32", "bfloat16")
    with caplog.at_level("INFO"), open_casters(EngineOptions(), file, lambda: None) as (casters, _):
        assert isinstance(casters, NumpyCasters)
    assert "cast on the CPU, since there is no CUDA device" in caplog.text


@only_without_gpu
def test_cuda_without_a_gpu_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "model").mkdir()
    save_file({"w": np.ones((4, 4), np.float32)}, tmp_path / "model" / "model.safetensors")
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "out"), "--device", "cuda"]) == 1
    message = capsys.readouterr().err
    assert "there is no CUDA device" in message
    assert "--device cpu" in message
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_cuda_without_torch_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DeviceError, match="needs torch") as caught:
        visible_gpus()
    assert "--device cpu" in str(caught.value)
