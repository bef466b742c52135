"""Iris for Gluon kernels: the device context, the functional operations, and what a Gluon layout needs to know.

import iris.gluon as iris_gl

@gluon.jit
def kernel(IrisDeviceCtx: gl.constexpr, context_tensor, ...):
    ctx = IrisDeviceCtx.initialize(context_tensor)
"""

from iris.context import Iris, iris
from iris.language.context import IrisDeviceCtx
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
from iris.language.target import threads_per_warp

__all__ = [
    "Iris",
    "IrisDeviceCtx",
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_sub",
    "atomic_xchg",
    "atomic_xor",
    "copy",
    "get",
    "iris",
    "load",
    "put",
    "store",
    "threads_per_warp",
]
