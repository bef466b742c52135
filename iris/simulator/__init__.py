"""Runs Triton and Gluon kernels on the CPU. It builds on Triton's interpreter, and adds what that lacks.

A kernel runs on CPU tensors, program by program, with real atomics on memory that rank processes share. The simulator
is switched on for the whole process when `iris` is imported, if

* ``IRIS_SIMULATOR=1``, or
* ``IRIS_SIMULATOR`` is not set, and the process has no GPU or Triton's own ``TRITON_INTERPRET=1`` is set.

Kernels must be defined after that. One that was defined earlier raises an error when it is launched.

The way of a launch through the modules here:

1. `kernels` takes ``kernel[grid](...)``, and turns the arguments into pointers and scalars.
2. `rewriting` turns the kernel's source into a Python function.
3. `grid` runs that function once for each program, and switches between programs that wait (`tasks`, `hang`).
4. The function calls ``tl`` and ``gl``, which `language` has bound to the semantic layer in `gluon`. It calls the
   builder in `interpreter`, which calculates with numpy and accesses memory.
5. What a GPU does in hardware has modules of its own: `tma`, `mbarrier`, `warpgroup`, `async_copy` and others.
"""

import os

import triton

from iris import wait_limit
from iris.mode import ACTIVE, TIMES, VARIABLE

__all__ = ["ACTIVE", "TIMES", "VARIABLE"]


def _activate() -> None:
    # Triton also puts a knob into the environment, for child processes. These are to decide for themselves.
    propagate, triton.knobs.propagate_env = triton.knobs.propagate_env, False
    triton.knobs.runtime.interpret = True
    triton.knobs.propagate_env = propagate

    from iris.simulator import aggregates, grid, hang, kernels, language  # noqa: F401 (hang: to learn the rank)

    if wait_limit.VARIABLE in os.environ:
        grid.limit_s = wait_limit.NANOSECONDS / 1e9
    aggregates.install()
    kernels.install()
    language.install()


if ACTIVE:
    _activate()
