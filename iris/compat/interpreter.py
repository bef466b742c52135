"""Triton's own interpreter, `triton.runtime.interpreter`, on which the simulator is built.

All of these are there in Triton 3.6 to 3.9. Where one is gone, importing `iris` in the simulator raises
`MissingPartError`. On a GPU none of them is used.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import triton.language as tl

from iris.compat.parts import required

_WHY = "run kernels on the CPU"

# A block inside the interpreter (its elements and their type), and a tensor descriptor.
TensorHandle = required("triton.runtime.interpreter:TensorHandle", _WHY)
TensorDescHandle = required("triton.runtime.interpreter:TensorDescHandle", _WHY)

# The builder, which carries out the operations of the semantic layer; and the compiler options that it shows.
InterpreterBuilder = required("triton.runtime.interpreter:InterpreterBuilder", _WHY)
InterpreterOptions = required("triton.runtime.interpreter:InterpreterOptions", _WHY)

# The class of the functions that `triton.jit` makes where kernels are interpreted.
InterpretedFunction = required("triton.runtime.interpreter:InterpretedFunction", _WHY)

numpy_dtype: Callable[[tl.dtype], np.dtype] = required("triton.runtime.interpreter:_get_np_dtype", _WHY)
"""The numpy type that a tensor of this dtype is stored in."""

convert_argument: Callable[[Any], Any] = required("triton.runtime.interpreter:_implicit_cvt", _WHY)
"""Converts an argument of a launch to what the kernel sees."""

# The atomic operations and memory orders of the interpreter's C++ part, by the compiler's constants.
native_operations = required("triton.runtime.interpreter:InterpreterBuilder.ir_rmw_op_to_interpreter_rmw_op", _WHY)
native_orders = required("triton.runtime.interpreter:InterpreterBuilder.ir_sem_to_interpreter_sem", _WHY)

required("triton.runtime.interpreter:InterpretedFunction.rewrite", _WHY)


def replace_function_methods(init: Callable, rewrite: Callable, call: Callable, run: Callable) -> None:
    """Replace the methods by which an `InterpretedFunction` is made, rewritten as Python, called, and launched."""
    InterpretedFunction.__init__ = init
    InterpretedFunction.rewrite = rewrite
    InterpretedFunction.__call__ = call
    InterpretedFunction.run = run


def replace_numpy_dtype(new: Callable[[tl.dtype], np.dtype]) -> None:
    """Let the interpreter itself call ``new`` for `numpy_dtype`."""
    module: Any = import_module("triton.runtime.interpreter")
    module._get_np_dtype = new


def leave_out_size_checks() -> None:
    """Skip the check of each new `TensorHandle` that its elements are no wider than its type, which takes time.

    It changes nothing in releases of Triton without that check.
    """
    TensorHandle.__post_init__ = lambda self: None
