"""Whether kernels of this process run in the simulator: decided once, when `iris` is imported.

What is below the simulator asks here. Others may ask `iris.simulator`, which has the same names.
"""

import multiprocessing
import os

import torch
import triton

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


ACTIVE: bool = _decide()
"""Whether kernels of this process run in the simulator."""

TIMES = "Kernels ran in the simulator: times and GB/s are those of this computer's CPU, and say nothing about a GPU."
"""For people, wherever times are shown that may be the simulator's."""
