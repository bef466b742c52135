"""Triton and Gluon kernels on the CPU: Triton's interpreter, made whole.

The simulator runs a kernel on CPU tensors, program after program, with real atomics on memory that rank processes
share. It is active, for the whole process and from the moment that `iris` is imported,

* when ``IRIS_SIMULATOR=1``,
* unless ``IRIS_SIMULATOR=0``, when the process has no GPU or Triton's own ``TRITON_INTERPRET=1`` is set.

Kernels must be defined after that; one that was defined earlier is an error when it is launched.
"""

import multiprocessing
import os

import torch
import triton

from iris import wait_limit
from iris.errors import InvalidSettingError
from iris.log import logger

VARIABLE = "IRIS_SIMULATOR"


def _decide() -> bool:
    choice = os.environ.get(VARIABLE, "")
    if choice not in ("", "0", "1"):
        raise InvalidSettingError(VARIABLE, choice, "1 (always), 0 (never) or nothing (when the process has no GPU)")
    if choice == "0" and triton.knobs.runtime.interpret:
        raise InvalidSettingError(VARIABLE, choice, "1 or nothing while TRITON_INTERPRET=1, which contradicts it")
    if choice:
        return choice == "1"
    if triton.knobs.runtime.interpret:
        return True
    if torch.cuda.is_available():  # ROCm's GPUs as well
        return False
    # Said once: rank 0 speaks for a torchrun, a parent for the processes that it spawns (whose name is all that is
    # set by the time they import the program).
    if os.environ.get("RANK", "0") == "0" and multiprocessing.current_process().name == "MainProcess":
        logger.info("No GPU: kernels run in the simulator (%s=0 to forbid it).", VARIABLE)
    return True


def _activate() -> None:
    # A knob that is assigned is also put into the environment, for child processes; they are to decide for themselves.
    propagate, triton.knobs.propagate_env = triton.knobs.propagate_env, False
    triton.knobs.runtime.interpret = True
    triton.knobs.propagate_env = propagate

    from iris.simulator import aggregates, grid, hang, kernels, language  # noqa: F401 (hang: for who knows the rank)

    if wait_limit.VARIABLE in os.environ:
        grid.limit_s = wait_limit.NANOSECONDS / 1e9
    aggregates.install()
    kernels.install()
    language.install()


ACTIVE: bool = _decide()
"""Whether kernels of this process run in the simulator."""

TIMES = "Kernels ran in the simulator: times and GB/s are those of this computer's CPU, and say nothing about a GPU."
"""For people, wherever times are shown that may be the simulator's."""

if ACTIVE:
    _activate()
