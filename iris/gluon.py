"""Iris for Gluon kernels: the device context, the functional operations, and what a Gluon layout needs to know.

import iris.gluon as iris_gl

@gluon.jit
def kernel(IrisDeviceCtx: gl.constexpr, context_tensor, ...):
    ctx = IrisDeviceCtx.initialize(context_tensor)
"""

from iris.context import Iris, iris
from iris.language.context import IrisDeviceCtx
from iris.language.functional import gluon_functions
from iris.language.target import threads_per_warp

load = gluon_functions.load
store = gluon_functions.store
get = gluon_functions.get
put = gluon_functions.put
copy = gluon_functions.copy
atomic_add = gluon_functions.atomic_add
atomic_sub = gluon_functions.atomic_sub
atomic_xchg = gluon_functions.atomic_xchg
atomic_and = gluon_functions.atomic_and
atomic_or = gluon_functions.atomic_or
atomic_xor = gluon_functions.atomic_xor
atomic_min = gluon_functions.atomic_min
atomic_max = gluon_functions.atomic_max
atomic_cas = gluon_functions.atomic_cas


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
