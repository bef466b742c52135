"""Collectives: `ctx.ccl`, its configuration, the operations of its reductions, and operators of ``torch.library``."""

from iris.ccl import functional
from iris.ccl.config import Config, ReduceOp
from iris.ccl.work import Work

__all__ = ["Config", "ReduceOp", "Work", "functional"]
