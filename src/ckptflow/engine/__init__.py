"""Executes plans: one streaming pass from source files to a weight file."""

from ckptflow.engine.compare import check_equal_sources, sources_equal
from ckptflow.engine.execute import write_weight_file
from ckptflow.engine.options import EngineOptions
from ckptflow.engine.record import TensorRecord, WeightFileRecord

__all__ = [
    "EngineOptions",
    "TensorRecord",
    "WeightFileRecord",
    "check_equal_sources",
    "sources_equal",
    "write_weight_file",
]
