"""Fused operations in graphs of torch.compile, whose back end Inductor is: models profit without an edit."""

from iris.inductor.accelerate import accelerate, compile_options, fusion_report
from iris.inductor.report import Fusion, FusionReport

__all__ = ["Fusion", "FusionReport", "accelerate", "compile_options", "fusion_report"]
