"""Marks of tests that run on each device, only with a GPU, or only without one."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

NO_GPU = not torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(NO_GPU, reason=f"torch {torch.__version__} sees no CUDA device here")]
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
only_without_gpu = pytest.mark.skipif(not NO_GPU, reason="there is a GPU here")
