"""Triton's compiled library, `triton._C.libtriton`: the compiler's constants, and atomic operations on host memory.

All of these are there in Triton 3.6 to 3.9. Where one is gone, importing `iris` in the simulator raises
`MissingPartError`. On a GPU none of them is used.
"""

from iris.compat.parts import required

_WHY = "run kernels on the CPU"

# The constants that the semantic layer passes to its builder.
ATOMIC_OP = required("triton._C.libtriton:ir.ATOMIC_OP", _WHY)
CACHE_MODIFIER = required("triton._C.libtriton:ir.CACHE_MODIFIER", _WHY)
MEM_SEMANTIC = required("triton._C.libtriton:ir.MEM_SEMANTIC", _WHY)
MEM_SYNC_SCOPE = required("triton._C.libtriton:ir.MEM_SYNC_SCOPE", _WHY)
PADDING_OPTION = required("triton._C.libtriton:ir.PADDING_OPTION", _WHY)
PROPAGATE_NAN = required("triton._C.libtriton:ir.PROPAGATE_NAN", _WHY)
ROUNDING_MODE = required("triton._C.libtriton:ir.ROUNDING_MODE", _WHY)

# Atomic operations (std::atomic) and loads, at arrays of host addresses.
atomic_cas = required("triton._C.libtriton:interpreter.atomic_cas", _WHY)
atomic_rmw = required("triton._C.libtriton:interpreter.atomic_rmw", _WHY)
load = required("triton._C.libtriton:interpreter.load", _WHY)
