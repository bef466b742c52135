"""What happens in the simulator when a kernel is defined, launched (``kernel[grid](...)``) or called by a kernel.

A launch turns its arguments into what a kernel sees, pointers and scalars. It then passes the kernel, rewritten as
Python (`iris.simulator.rewriting`), to the scheduler (`iris.simulator.grid`). `install` puts the functions here in the
place of methods of Triton's classes.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton import JITFunction
from triton.runtime import Autotuner

from iris import observer
from iris.compat.autotuner import replace_measurements
from iris.compat.interpreter import (
    InterpretedFunction,
    TensorHandle,
    convert_argument,
    leave_out_size_checks,
    replace_function_methods,
    replace_numpy_dtype,
)
from iris.compat.triton_jit import compiler_options, mangle_type, replace_launches
from iris.errors import KernelDefinedTooEarlyError, LaunchError, NotInSimulatorError, NotOnCpuError
from iris.operators.graph_break import breaks_graph
from iris.operators.stand_ins import stand_in
from iris.simulator import dtypes, lines, noted, tasks, tma
from iris.simulator import grid as scheduler
from iris.simulator.rewriting import lines_of, rewrite
from iris.simulator.semantic import semantic

# Arguments of a launch -----------------------------------------------------------------------------------------------


def _is_constant(annotation: Any) -> bool:
    """Whether this annotates a compile-time constant. It may be a string, such as "gl.constexpr"."""
    spelled = isinstance(annotation, str) and annotation.strip("'\" ").split(".")[-1] == "constexpr"
    return spelled or annotation is tl.constexpr


_pointer_types: dict[torch.dtype, tl.pointer_type] = {}


def _argument(value: Any, name: str, kernel: str) -> Any:
    """What a kernel sees of an argument that is not a compile-time constant: a tensor becomes a pointer, for example.

    ``name`` and ``kernel`` are for errors.
    """
    if isinstance(value, torch.Tensor):
        problem = stand_in(value)
        if problem:
            raise LaunchError(f"Argument {name!r} of kernel {kernel!r} is {problem}")
        if value.device.type != "cpu":
            raise NotOnCpuError(kernel, name, value.device)
        if value.dtype not in _pointer_types:
            if value.dtype.is_complex or value.is_quantized:
                raise LaunchError(
                    f"Argument {name!r} of kernel {kernel!r} has dtype {value.dtype}, which Triton lacks."
                )
            _pointer_types[value.dtype] = tl.str_to_ty(mangle_type(value), None)
        pointer = _pointer_types[value.dtype]
        return tl.tensor(TensorHandle(np.array([value.data_ptr()], dtype=np.uint64), pointer), pointer)
    if isinstance(value, bool):
        return semantic.to_tensor(value)
    if isinstance(value, int):
        small, signed = -(2**31) <= value < 2**31, value < 2**63
        dtype = tl.int32 if small else tl.int64 if signed else tl.uint64
        return tl.tensor(TensorHandle(np.array([value], dtype=dtypes.storage(dtype)), dtype), dtype)
    if isinstance(value, float):
        return tl.tensor(semantic.builder.get_fp32(value), tl.float32)
    if isinstance(value, tuple):
        items = [_argument(item, f"{name}.{field}", kernel) for field, item in _fields(value)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, tma.HOST_DESCRIPTORS):
        return tma.from_host(value, _argument(value.base, name, kernel))
    if hasattr(value, "get_device_context"):
        raise LaunchError(
            f"Argument {name!r} of kernel {kernel!r} is the host's context: give the kernel ctx.get_device_context()."
        )
    if isinstance(value, (str, list, dict, np.ndarray, np.generic, tl.dtype, torch.dtype)):
        raise LaunchError(
            f"Argument {name!r} of kernel {kernel!r} is a {type(value).__name__}. A kernel takes tensors, Python's "
            "numbers and tuples of them; anything else only for a parameter annotated tl.constexpr."
        )
    return convert_argument(value)


def _fields(value: tuple) -> Iterable[tuple[Any, Any]]:
    """The members of a tuple, each with its name or, of a tuple without names, its index."""
    return zip(getattr(value, "_fields", range(len(value))), value, strict=True)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an argument, with their names: ``a.ptr`` if the argument ``a`` is a tuple."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, tuple):
        for field, item in _fields(value):
            yield from _tensors(f"{name}.{field}", item)


def _dimensions(grid: Any, kernel: str) -> tuple[int, ...]:
    try:
        dims = tuple(map(operator.index, grid))
    except TypeError:
        dims = ()
    if not 1 <= len(dims) <= 3:
        raise LaunchError(
            f"Kernel {kernel!r} has the grid {grid!r}. A grid is a tuple of one to three whole numbers, or a function "
            "that returns one."
        )
    return dims


# What replaces the methods of Triton's classes -----------------------------------------------------------------------


_stock_init = InterpretedFunction.__init__
in_python = breaks_graph("the simulator runs kernels in Python")


def define(self: InterpretedFunction, fn: FunctionType, **options: Any) -> None:
    """``InterpretedFunction.__init__``, for what ``@triton.jit`` makes."""
    _stock_init(self, fn, **options)
    # What help() and `inspect.signature` show. Without the former their arguments would be ``*args, **kwargs``.
    self.__wrapped__, self.__doc__ = fn, fn.__doc__
    # Read now, as the compiler does: by the time of the first launch someone may have edited the file.
    self._lines = lines_of(fn)


def rewritten(self: InterpretedFunction) -> FunctionType:
    """The Python function that stands for the kernel, made at the first use."""
    try:
        return self._simulated
    except AttributeError:
        lines = self._lines if hasattr(self, "_lines") else lines_of(self.fn)  # defined before the simulator
        self._simulated = rewrite(self.fn, lines)
        return self._simulated


def _signature(self: InterpretedFunction) -> inspect.Signature:
    try:
        return self._signature
    except AttributeError:
        self._signature = inspect.signature(self.fn)
        return self._signature


class GluonFunction(InterpretedFunction):
    """What ``@gluon.jit`` makes."""


def call(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """A call from within a kernel."""
    if not tasks.in_kernel():
        raise LaunchError(
            f"{self.fn.__name__!r} was called outside a kernel. Call it inside one or, if it is a kernel itself, "
            f"launch it with a grid: {self.fn.__name__}[grid](...)."
        )
    function, task = rewritten(self), tasks.current()
    if task.spinning and self.fn.__code__.co_filename.startswith(lines.LANGUAGE):
        return noted.call_library(function, *args, **kwargs)
    if task.dropped and lines.owner(self.fn.__code__) != lines.INTERNAL:
        return noted.call_used(function, *args, **kwargs)
    return function(*args, **kwargs)


@in_python
def launch(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """``kernel[grid](...)``. Options of the compiler are accepted; only ``num_warps`` has a meaning here."""
    if warmup:
        return
    for hook in self.pre_run_hooks:
        hook(*args, **kwargs)
    num_warps = kwargs.get("num_warps", 4)
    if isinstance(self, GluonFunction) and (num_ctas := kwargs.get("num_ctas", 1)) > 1:
        # To Triton's kernels it makes no difference; layouts say what of Gluon's lies in which CTA.
        raise NotInSimulatorError(f"num_ctas={num_ctas} of a Gluon kernel")
    signature = _signature(self)
    parameters = signature.parameters
    kernel = self.fn.__name__
    for name in kwargs:
        if name not in parameters and name not in compiler_options():
            raise LaunchError(f"Kernel {kernel!r} has no parameter {name!r}, and the compiler no option of that name.")
    try:
        bound = signature.bind(*args, **{name: value for name, value in kwargs.items() if name in parameters})
    except TypeError as error:
        raise LaunchError(f"Kernel {kernel!r} takes ({', '.join(parameters)}): {error}.") from None
    bound.apply_defaults()
    dims = _dimensions(grid(dict(bound.arguments)) if callable(grid) else grid, kernel)
    values = {
        name: value if _is_constant(parameters[name].annotation) else _argument(value, name, kernel)
        for name, value in bound.arguments.items()
    }
    if observer.recorder is not None:
        for argument in bound.arguments.items():
            for name, value in _tensors(*argument):
                observer.recorder.kernel_argument(name, value)
    program = functools.partial(rewritten(self), **values)
    columns, rows, layers = dims + (1,) * (3 - len(dims))
    scheduler.run(kernel, (columns, rows, layers), num_warps, program)


def first_config(self: Autotuner, *args: Any, config: Any, **options: Any) -> list[float]:
    """The time that the autotuner measures, the same for each configuration: the first wins, and none is run for it."""
    return [0.0, 0.0, 0.0]


def no_disk_cache(self: Autotuner, key: Any, configs: Any, choose: Callable) -> Any:
    """Choose without the autotuner's cache on disk, which is for times on GPUs."""
    return choose()


def defined_too_early(self: JITFunction, *args: Any, **kwargs: Any) -> None:
    """The launch of a kernel that was defined before the simulator was active."""
    code = self.fn.__code__
    raise KernelDefinedTooEarlyError(self.fn.__name__, f"{code.co_filename}:{code.co_firstlineno}")


def install() -> None:
    """Put these functions in the place of Triton's. Once for the life of the process."""
    replace_function_methods(define, rewritten, call, launch)
    replace_launches(defined_too_early)
    in_python(Autotuner.run)
    replace_measurements(first_config, no_disk_cache)
    # The rest is for speed.
    replace_numpy_dtype(dtypes.storage)  # which caches what the interpreter's function returns
    leave_out_size_checks()  # of tensors: they take longer than all else that makes one
