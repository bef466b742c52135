"""Triton and Gluon kernels on the CPU: Triton's interpreter, made whole.

The simulator runs a kernel on CPU tensors, program after program, with real atomics on memory that rank processes
share. It is active, for the whole process and from the moment that `iris` is imported,

* when ``IRIS_SIMULATOR=1``,
* unless ``IRIS_SIMULATOR=0``, when the process has no GPU or Triton's own ``TRITON_INTERPRET=1`` is set.

Kernels must be defined after that; one that was defined earlier is an error when it is launched.
"""

import os

import triton

from iris import wait_limit
from iris.mode import ACTIVE, TIMES, VARIABLE

__all__ = ["ACTIVE", "TIMES", "VARIABLE"]


def _activate() -> None:
    # A knob that is assigned is also put into the environment, for child processes; they are to decide for themselves.
    propagate, triton.knobs.propagate_env = triton.knobs.propagate_env, False
    triton.knobs.runtime.interpret = True
    triton.knobs.propagate_env = propagate

    from iris.simulator import aggregates, grid, hang, kernels, language  # noqa: F401 (hang: it learns the rank)

    if wait_limit.VARIABLE in os.environ:
        grid.limit_s = wait_limit.NANOSECONDS / 1e9
    aggregates.install()
    kernels.install()
    language.install()


if ACTIVE:
    _activate()
