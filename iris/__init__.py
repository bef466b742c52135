"""Iris: one-sided communication between GPUs from inside Triton and Gluon kernels.

    import iris

    ctx = iris.iris(heap_size=1 << 30)        # a symmetric heap on every rank
    buffer = ctx.zeros(4096)                  # the same offset in each
    kernel[grid](buffer, ctx.get_heap_bases())

In a kernel, ``iris.load``, ``iris.store``, ``iris.atomic_add`` ... take a pointer into the caller's heap and the rank
to reach; `iris.DeviceContext` carries rank and bases itself. See `iris.gluon` for Gluon kernels.
"""

# First of all: without Triton nothing else can be imported.
from iris import errors, requirements

try:
    requirements.check()
except errors.TritonMissingError:
    # `python -m iris` still runs, since its `info` is to say what is missing. Python imports the package before its
    # __main__, so the command line runs from here, and ends the process.
    if requirements.runs_command():
        from iris.__main__ import main

        main()
    raise

# Then this: it decides whether kernels run in the simulator, which must be settled before any is defined.
from iris import simulator  # isort: skip

# And this registers with iris/observer.py, for programs that are to be watched.
from iris import sanitizer as _sanitizer  # noqa: F401 # isort: skip
from logging import DEBUG, ERROR, INFO, WARNING

from iris import ccl, experimental, experts, gluon, ops, spawn, x
from iris.bench.timing import do_bench
from iris.context import Iris, iris
from iris.inductor import accelerate, fusion_report
from iris.language.context import DeviceContext
from iris.language.functional import (
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_sub,
    atomic_xchg,
    atomic_xor,
    copy,
    get,
    load,
    put,
    store,
)
from iris.language.tracing import TraceEvent
from iris.log import set_logger_level
from iris.version import __version__ as __version__
from iris.x import AllReduceConfig, TensorView, Tile, TileView, make_tensor_view

# Older names of the device context.
Context = DeviceContext
TritonContext = DeviceContext


__all__ = [
    "DEBUG",
    "ERROR",
    "INFO",
    "WARNING",
    "AllReduceConfig",
    "Context",
    "DeviceContext",
    "Iris",
    "TensorView",
    "Tile",
    "TileView",
    "TraceEvent",
    "TritonContext",
    "accelerate",
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_sub",
    "atomic_xchg",
    "atomic_xor",
    "ccl",
    "copy",
    "do_bench",
    "errors",
    "experimental",
    "experts",
    "fusion_report",
    "get",
    "gluon",
    "iris",
    "load",
    "make_tensor_view",
    "ops",
    "put",
    "set_logger_level",
    "simulator",
    "spawn",
    "store",
    "x",
]
