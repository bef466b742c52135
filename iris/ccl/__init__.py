"""Collectives: `ctx.ccl`, its configuration, and the operations of its reductions."""

from iris.ccl.config import Config, ReduceOp
from iris.ccl.work import Work

__all__ = ["Config", "ReduceOp", "Work"]
