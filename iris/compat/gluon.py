"""The class of the functions that `gluon.jit` makes, `triton.experimental.gluon._runtime.GluonJITFunction`.

It is there in Triton 3.6 to 3.9. Where it is gone, `replace_function_class` raises `MissingPartError`, and with it the
import of `iris` in the simulator.
"""

from importlib import import_module
from typing import Any

from iris.compat.parts import required


def replace_function_class(cls: type) -> None:
    """Let `gluon.jit` make objects of ``cls``, which is called with the function and its options."""
    required("triton.experimental.gluon._runtime:GluonJITFunction", "run Gluon's kernels on the CPU")
    module: Any = import_module("triton.experimental.gluon._runtime")
    module.GluonJITFunction = cls
