"""Jitted functions in the simulator: how a kernel's source becomes Python that runs, how it is called and launched.

A kernel is Python, but not quite: ``x = 0`` makes a tensor, ``range`` counts in tensors, ``a and b`` on blocks works
element by element. Its source is rewritten accordingly and compiled once; file names and line numbers stay, so
tracebacks point at the user's lines. Globals, closures and defaults are those of the original function.
"""

import ast
import functools
import inspect
import operator
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import import_module
from types import CellType, CodeType, FunctionType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpretedFunction, TensorHandle
from triton.runtime.jit import JITFunction, mangle_type

from iris.errors import KernelDefinedTooEarlyError, LaunchError, NotInSimulatorError, NotOnCpuError
from iris.simulator import dtypes, sanitizer, tasks, tma
from iris.simulator import grid as scheduler
from iris.simulator.gluon import semantic
from iris.untraced import untraced

# What rewritten code calls -------------------------------------------------------------------------------------------


def _assigned(value: Any) -> Any:
    """What a name stands for after ``name = value``: numbers become tensors, as in the compiler."""
    if hasattr(value, "_fields"):
        return type(value)(*map(tl.core._unwrap_if_constexpr, value))  # which makes a plain tuple of a named one
    value = tl.core._unwrap_if_constexpr(value)
    return semantic.to_tensor(value) if isinstance(value, (bool, int, float)) else value


def _and(left: Any, right: Callable[[], Any]) -> Any:
    if isinstance(left, tl.tensor) and left.type.is_block():
        return left.logical_and(right())
    return left and right()


def _or(left: Any, right: Callable[[], Any]) -> Any:
    if isinstance(left, tl.tensor) and left.type.is_block():
        return left.logical_or(right())
    return left or right()


def _compare(left: Any, *steps: Callable) -> Any:
    """A chain ``a < b < c``; ``steps``: a comparison and what gives its right side, in turn."""
    result: Any = True
    for comparison, operand in zip(steps[::2], steps[1::2], strict=True):
        if not result:  # as in Python, what comes after is not evaluated
            return result
        right = operand()
        holds = comparison(left, right)
        result = holds if result is True else _and(result, lambda holds=holds: holds)
        left = right
    return result


def _not(value: Any) -> Any:
    return semantic.not_(value) if isinstance(value, tl.tensor) and value.type.is_block() else not value


def _joined(left: Any, right: Any) -> list:
    """``[n] + block.shape``: to the compiler lists and tuples are one type."""
    return [*left, *right]


def counted(*bounds: Any, **options: Any) -> Iterator[tl.tensor]:
    """``range`` in a kernel: counts in tensors of the bounds' integer type."""
    bounds = tuple(tl.core._unwrap_if_constexpr(bound) for bound in bounds)
    named = (options.get("arg1"), options.get("arg2"), options.get("step"))
    bounds += tuple(tl.core._unwrap_if_constexpr(bound) for bound in named if bound is not None)
    tensors = [semantic.to_tensor(bound) for bound in bounds]
    dtype = max((tensor.dtype for tensor in tensors), key=lambda dtype: dtype.primitive_bitwidth)
    storage = dtypes.storage(dtype)
    for i in range(*map(operator.index, bounds)):
        yield tl.tensor(TensorHandle(np.array([i], dtype=storage), dtype), dtype)


_HELPERS: dict[str, Callable] = {
    "__simulated_assigned__": _assigned,
    "__simulated_and__": _and,
    "__simulated_or__": _or,
    "__simulated_not__": _not,
    "__simulated_compare__": _compare,
    "__simulated_joined__": _joined,
    "__simulated_range__": counted,
    "__simulated_min__": lambda *values, **options: tl.core.builtin_min(*values, **options),
    "__simulated_max__": lambda *values, **options: tl.core.builtin_max(*values, **options),
}


_BUILTINS = frozenset({"range", "min", "max"})


class _Rewriter(ast.NodeTransformer):
    """From a kernel's syntax tree to that of a Python function that does the same."""

    def __init__(self, shadowed: frozenset[str]) -> None:
        self._shadowed = shadowed

    def _call(self, node: ast.AST, helper: str, *args: ast.expr) -> ast.expr:
        function = ast.Name(id=f"__simulated_{helper}__", ctx=ast.Load())
        return ast.copy_location(ast.Call(func=function, args=list(args), keywords=[]), node)

    def _later(self, value: ast.expr) -> ast.expr:
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        return ast.copy_location(ast.Lambda(args=nothing, body=value), value)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Tuple):
            node.value.elts = [self._call(element, "assigned", element) for element in node.value.elts]
        else:
            node.value = self._call(node.value, "assigned", node.value)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        helper = "and" if isinstance(node.op, ast.And) else "or"
        result = node.values[0]
        for value in node.values[1:]:
            result = self._call(node, helper, result, self._later(value))
        return result

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return self._call(node, "not", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        displayed = any(isinstance(side, (ast.List, ast.Tuple)) or _is_joined(side) for side in (node.left, node.right))
        if isinstance(node.op, ast.Add) and displayed:
            return self._call(node, "joined", node.left, node.right)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) == 1:
            return node
        steps: list[ast.expr] = []
        for op, operand in zip(node.ops, node.comparators, strict=True):
            step = ast.parse("lambda left, right: left < right", mode="eval").body
            step.body.ops = [op]
            steps += [step, self._later(operand)]
        return self._call(node, "compare", node.left, *steps)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in _BUILTINS - self._shadowed:
            node.func.id = f"__simulated_{node.func.id}__"
        return node


def _is_joined(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "__simulated_joined__"


def _source(function: FunctionType) -> str | None:
    """The text of the function, decorators included; None where there is none, as in an interactive session."""
    try:
        lines, _ = inspect.findsource(function)
        return "".join(inspect.getblock(lines[function.__code__.co_firstlineno - 1 :]))
    except (OSError, TypeError, IndexError):
        return None


# In Python 3.11 a tree that two threads make at a time fails: its depth is counted for both (CPython issue 106905).
_one_thread = threading.Lock()


@functools.cache
def _rewritten_code(code: CodeType, filename: str, source: str, shadowed: frozenset[str]) -> CodeType:
    """The code of the rewritten function.

    ``filename`` is the code's own: equal codes from two files are equal, and their lines are not.
    """
    indented = source[:1].isspace()
    tree = ast.parse("if True:\n" * indented + source)
    ast.increment_lineno(tree, code.co_firstlineno - 1 - indented)
    body = tree.body[0].body if indented else tree.body
    function = next(node for node in body if isinstance(node, ast.FunctionDef))
    function.decorator_list = []
    rewriter = _Rewriter(shadowed)
    function.body = [rewriter.visit(statement) for statement in function.body]
    # A function around it whose parameters have the names of the free variables makes them free variables again.
    around = ast.parse(f"def around({', '.join((*_HELPERS, *code.co_freevars))}): pass").body[0]
    # Under another name, so that its own, which a recursive function calls, is not one of these variables.
    function.name = "__simulated_function__"
    around.body = [function]
    module = compile(ast.fix_missing_locations(ast.Module([around], [])), filename, "exec", dont_inherit=True)
    return _constant(_constant(module, "around"), function.name).replace(co_name=code.co_name)


def _constant(code: CodeType, name: str) -> CodeType:
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)


def _rewrite(function: FunctionType, source: str | None) -> FunctionType:
    if source is None:
        return function
    original = function.__code__
    shadowed = _BUILTINS & {*function.__globals__, *original.co_varnames, *original.co_freevars}
    with _one_thread:
        code = _rewritten_code(original, original.co_filename, source, shadowed)
    cells = {name: CellType(helper) for name, helper in _HELPERS.items()}
    cells.update(zip(original.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in code.co_freevars)
    result = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    result.__kwdefaults__ = function.__kwdefaults__
    # For what Python says of missing arguments; where a method was made is no matter of who calls it.
    result.__qualname__ = function.__qualname__.rpartition("<locals>.")[2]
    return result


# How a kernel is launched --------------------------------------------------------------------------------------------


def _is_constant(annotation: Any) -> bool:
    """Whether a parameter is a compile-time constant; a string may spell it in any way: "gl.constexpr"."""
    spelled = isinstance(annotation, str) and annotation.strip("'\" ").split(".")[-1] == "constexpr"
    return spelled or annotation is tl.constexpr


_pointer_types: dict[torch.dtype, tl.pointer_type] = {}


def _argument(value: Any, name: str, kernel: str) -> Any:
    """What a kernel sees of an argument that is not a compile-time constant."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise NotOnCpuError(kernel, name, value.device)
        if value.dtype not in _pointer_types:
            if value.dtype.is_complex:
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
        items = [_argument(item, name, kernel) for item in value]
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
    return stock._implicit_cvt(value)


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
in_python = untraced("the simulator runs kernels in Python")


def define(self: InterpretedFunction, fn: FunctionType, **options: Any) -> None:
    _stock_init(self, fn, **options)
    # Read now, as the compiler does: by the time of the first launch someone may have edited the file.
    self._source = _source(fn)


def rewritten(self: InterpretedFunction) -> FunctionType:
    try:
        return self._simulated
    except AttributeError:
        source = self._source if hasattr(self, "_source") else _source(self.fn)  # defined before the simulator
        self._simulated = _rewrite(self.fn, source)
        return self._simulated


def _signature(self: InterpretedFunction) -> inspect.Signature:
    try:
        return self._signature
    except AttributeError:
        self._signature = inspect.signature(self.fn)
        return self._signature


class GluonFunction(InterpretedFunction):
    """What `gluon.jit` makes."""


def call(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """A call from within a kernel."""
    if not tasks.in_kernel():
        raise LaunchError(
            f"{self.fn.__name__!r} was called outside a kernel. Call it inside one or, if it is a kernel itself, "
            f"launch it with a grid: {self.fn.__name__}[grid](...)."
        )
    return rewritten(self)(*args, **kwargs)


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
        if name not in parameters and name not in _options():
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
    if sanitizer.recorder is not None:
        for name, value in bound.arguments.items():
            if isinstance(value, torch.Tensor):
                sanitizer.recorder.given(name, value)
    program = functools.partial(rewritten(self), **values)
    scheduler.run(kernel, dims + (1,) * (3 - len(dims)), num_warps, program)


@functools.cache
def _options() -> frozenset[str]:
    """What the compilers for NVIDIA and AMD take beside a kernel's own parameters."""
    return frozenset(
        option.name
        for vendor, options in (("nvidia", "CUDAOptions"), ("amd", "HIPOptions"))
        for option in fields(getattr(import_module(f"triton.backends.{vendor}.compiler"), options))
    )


def first_config(self: Autotuner, *args: Any, config: Any, **options: Any) -> list[float]:
    """In the place of a configuration's time: the first one wins, on every rank, and none runs twice."""
    return [0.0, 0.0, 0.0]


def defined_too_early(self: JITFunction, *args: Any, **kwargs: Any) -> None:
    code = self.fn.__code__
    raise KernelDefinedTooEarlyError(self.fn.__name__, f"{code.co_filename}:{code.co_firstlineno}")


def install() -> None:
    """Let jitted functions run here: those of now, and those to come."""
    InterpretedFunction.__init__ = define
    InterpretedFunction.rewrite = rewritten
    InterpretedFunction.__call__ = call
    InterpretedFunction.run = launch
    JITFunction.run = JITFunction.__call__ = defined_too_early
    in_python(Autotuner.run)
    Autotuner._bench = first_config
    Autotuner.check_disk_cache = lambda self, key, configs, choose: choose()
    stock._get_np_dtype = dtypes.storage  # the same, remembered
