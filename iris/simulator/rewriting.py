"""How the source of a kernel is rewritten as a Python function that does the same.

A kernel is Python, but not quite: ``x = 0`` makes a tensor, ``range`` counts in tensors, ``a and b`` on blocks works
element by element. So its syntax tree is rewritten: such places become calls of helpers, below. Statements and loops
also report what the scheduler and the sanitizer need (`iris.simulator.noted`). The tree is compiled once. File names
and line numbers stay, so tracebacks point at the user's lines. Globals, closures and defaults are the original ones.
"""

import ast
import copy
import functools
import inspect
import operator
import re
import threading
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any, cast

import numpy as np
import triton.language as tl

from iris.compat.interpreter import TensorHandle
from iris.compat.semantic import builtin_for
from iris.errors import KernelSourceMissingError
from iris.simulator import dtypes, noted, refused, spinning
from iris.simulator.lines import INSTALLED, USER, owner_of
from iris.simulator.parsing import parse
from iris.simulator.semantic import semantic
from iris.simulator.shapes import unwrapped

# What rewritten code calls -------------------------------------------------------------------------------------------


def _assigned(value: Any) -> Any:
    """What a name stands for after ``name = value``: numbers become tensors, as in the compiler."""
    if hasattr(value, "_fields"):
        return type(value)(*map(unwrapped, value))  # `unwrapped` itself would make a plain tuple of a named one
    value = unwrapped(value)
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
    """A chain ``a < b < c``. ``steps``: in turn a comparison, and a function that gives its right side."""
    result: Any = True
    for comparison, operand in zip(steps[::2], steps[1::2], strict=True):
        if not result:  # as in Python, what comes after is not evaluated
            return result
        right = operand()
        holds = comparison(left, right)
        result = holds if result is True else _and(result, lambda holds=holds: holds)  # type: ignore[misc]
        left = right
    return result


def _not(value: Any) -> Any:
    return semantic.not_(value) if isinstance(value, tl.tensor) and value.type.is_block() else not value


def _joined(left: Any, right: Any) -> list:
    """``[n] + block.shape``, a list and a tuple: to the compiler these are one type."""
    return [*left, *right]


def counted(*bounds: Any, **options: Any) -> Iterator[tl.tensor]:
    """``range`` and `tl.range` in a kernel: count in tensors of the bounds' integer type."""
    bounds = tuple(unwrapped(bound) for bound in bounds)
    named = (options.get("arg1"), options.get("arg2"), options.get("step"))
    bounds += tuple(unwrapped(bound) for bound in named if bound is not None)
    tensors = [semantic.to_tensor(bound) for bound in bounds]
    dtype = max((tensor.dtype for tensor in tensors), key=lambda dtype: dtype.primitive_bitwidth)
    storage = dtypes.storage(dtype)
    for i in range(*map(operator.index, bounds)):
        yield tl.tensor(TensorHandle(np.array([i], dtype=storage), dtype), dtype)


# By the names that rewritten code has for them.
_HELPERS: dict[str, Callable] = {
    "__simulated_assigned__": _assigned,
    "__simulated_and__": _and,
    "__simulated_or__": _or,
    "__simulated_not__": _not,
    "__simulated_compare__": _compare,
    "__simulated_joined__": _joined,
    "__simulated_range__": counted,
    "__simulated_dropped__": noted.call_dropped,
    "__simulated_looked__": noted.look_of_loop,
    "__simulated_spinning__": noted.spinning,
    "__simulated_condition__": refused.condition,
    "__simulated_refused__": refused.refuse_construct,
    "__simulated_global__": refused.refuse_global,
    "__simulated_types__": refused.types_of,
    "__simulated_carried__": refused.check_carried,
    "__simulated_min__": lambda *values, **options: builtin_for("min")(*values, **options),
    "__simulated_max__": lambda *values, **options: builtin_for("max")(*values, **options),
}

# Functions of Python's that a helper replaces, unless the kernel's own names hide them.
_BUILTINS = frozenset({"range", "min", "max"})


class _Rewriter(ast.NodeTransformer):
    """Rewrites a kernel's syntax tree.

    ``shadowed``: those of `_BUILTINS` that the kernel's own names hide. ``of_the_host``: what it may not read of its
    globals. ``is_users``: it is no kernel of the library's, which are known to compile.
    """

    def __init__(self, shadowed: frozenset[str], of_the_host: frozenset[str], is_users: bool) -> None:
        self._shadowed, self._of_the_host, self._is_users = shadowed, of_the_host, is_users
        self._loops = self._number = 0
        # Variables that there are for certain: to the compiler, what a loop has made is gone after it, and so is what a
        # branch has made, unless both make it.
        self._live: set[str] = set()

    def visit(self, node: ast.AST) -> Any:
        what = refused.construct(node, in_loop=self._loops > 0) if self._is_users else None
        if what is None:
            return super().visit(node)
        raises = self._call(node, "refused", ast.copy_location(ast.Constant(what), node))
        return raises if isinstance(node, ast.expr) else ast.copy_location(ast.Expr(raises), node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self._of_the_host and self._is_users:
            return self._call(node, "global", ast.copy_location(ast.Constant(node.id), node), node)
        return node

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        self._live |= {each.arg for each in (*node.posonlyargs, *node.args, *node.kwonlyargs)}
        return node

    def visit_If(self, node: ast.If | ast.IfExp | ast.While) -> ast.AST:
        outside = set(self._live)
        self.generic_visit(node)
        self._live = outside
        if self._is_users:
            node.test = self._call(node.test, "condition", node.test)
        return node

    visit_IfExp = visit_If

    def visit_For(self, node: ast.For) -> ast.AST | list[ast.stmt]:
        # `tl.static_range` is no loop for the compiler: it repeats the body.
        loops = not ast.unparse(node.iter).partition("(")[0].endswith("static_range")
        self._loops += loops
        outside, names = set(self._live), sorted(_names_stored(*node.body) & self._live)
        self.generic_visit(node)
        self._live = outside
        self._loops -= loops
        return self._carrying(node, node, names) if loops and self._is_users else node

    def _carrying(self, loop: ast.For | ast.While, statement: ast.stmt, names: list[str]) -> list[ast.stmt]:
        """The ``statement``, which is the loop or around it, with a check that rounds change no variable's type."""
        self._number += 1
        before = f"__simulated_types_{self._number}__"
        begins, ends = parse(
            f"{before} = __simulated_types__(locals(), {names})\n__simulated_carried__(locals(), {before})"
        ).body
        for node in (*ast.walk(begins), *ast.walk(ends)):
            ast.copy_location(node, loop)
        loop.body.append(ends)
        return [begins, statement]

    def _call(self, node: ast.AST, helper: str, *args: ast.expr) -> ast.expr:
        """A call of a helper, in the line of ``node``."""
        function = ast.copy_location(ast.Name(id=f"__simulated_{helper}__", ctx=ast.Load()), node)
        return ast.copy_location(ast.Call(func=function, args=list(args), keywords=[]), node)

    def _later(self, value: ast.expr) -> ast.expr:
        """``lambda: value``, for what may not be computed yet, or not at all."""
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        return ast.copy_location(ast.Lambda(args=nothing, body=value), value)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self._live |= _names_stored(node)
        self.generic_visit(node)
        if isinstance(node.value, ast.Tuple):
            node.value.elts = [self._call(element, "assigned", element) for element in node.value.elts]
        else:
            node.value = self._call(node.value, "assigned", node.value)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Call):
            self._call_by("dropped", node.value)
        return node

    def visit_While(self, node: ast.While) -> ast.AST | list[ast.stmt]:
        comparison, spins = spinning.comparison(node), spinning.spins(node)
        names = sorted(_names_stored(*node.body) & self._live)
        self._loops += 1
        if comparison is None:
            self.visit_If(node)
        else:
            wanted = self.visit(copy.deepcopy(comparison.wanted))
            self.visit_If(node)
            cmp = ast.copy_location(ast.Constant(comparison.cmp), wanted)
            self._call_by("looked", comparison.look, cmp, self._later(wanted))
        self._loops -= 1
        if not self._is_users:
            return node
        around: ast.stmt = node
        if spins:
            around = ast.copy_location(ast.With([ast.withitem(self._call(node, "spinning"), None)], [node]), node)
        return self._carrying(node, around, names)

    def _call_by(self, helper: str, node: ast.Call, *before: ast.expr) -> None:
        """Turn ``f(x)`` into ``helper(*before, f, x)``: the helper makes the call."""
        node.args = [*before, node.func, *node.args]
        node.func = ast.copy_location(ast.Name(id=f"__simulated_{helper}__", ctx=ast.Load()), node)

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
            step = cast(ast.Expr, parse("lambda left, right: left < right").body[0]).value
            assert isinstance(step, ast.Lambda) and isinstance(step.body, ast.Compare)
            step.body.ops = [op]
            steps += [step, self._later(operand)]
        return self._call(node, "compare", node.left, *steps)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in _BUILTINS - self._shadowed:
            node.func.id = f"__simulated_{node.func.id}__"
        return node


def _names_stored(*statements: ast.stmt) -> set[str]:
    """The names that these assign to."""
    nodes = (node for statement in statements for node in ast.walk(statement))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _is_joined(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "__simulated_joined__"


_DEFINITION = re.compile(r"\s*def\b(?:\s+(?P<name>\w+)\s*\()?")


def lines_of(function: FunctionType) -> list[str]:
    """The lines of the function's file, from its first decorator to the end of the file.

    (To find where the function ends takes long, and is left to `rewrite`.) Without its source a kernel would run as the
    Python that it is, and compute something else. So that is a `KernelSourceMissingError`.
    """
    code = function.__code__
    try:
        lines = inspect.findsource(function)[0][code.co_firstlineno - 1 :]
    except (OSError, TypeError, IndexError):
        lines = []
    # The text may be another one: the file was edited, or another source is called "<string>" too.
    definition = next(filter(None, map(_DEFINITION.match, lines)), None)
    if definition is None or definition["name"] != code.co_name:
        raise KernelSourceMissingError(code.co_name, f"{code.co_filename}:{code.co_firstlineno}")
    return lines


def _definition(source: str, first_line: int) -> ast.FunctionDef:
    """The syntax tree of a function's text, which begins at ``first_line`` and may be indented."""
    indented = source[:1].isspace()
    tree = parse("\n" * (first_line - 1 - indented) + "if True:\n" * indented + source)
    (first, *_) = body = tree.body
    if indented:
        assert isinstance(first, ast.If)
        body = first.body
    return next(node for node in body if isinstance(node, ast.FunctionDef))


# In Python 3.11 no two threads may compile syntax trees at the same time (CPython issue 106905).
_one_thread = threading.Lock()


@functools.cache
def _rewritten_code(
    code: CodeType, filename: str, source: str, shadowed: frozenset[str], of_the_host: frozenset[str]
) -> CodeType:
    """The code of the rewritten function.

    ``filename`` is ``code``'s own. It is an argument for the cache: codes of two files may compare as equal.
    """
    function = _definition(source, code.co_firstlineno)
    function.decorator_list = []
    rewriter = _Rewriter(shadowed, of_the_host, owner_of(filename) in (USER, INSTALLED))
    rewriter.generic_visit(function)
    # Compiled inside a function whose parameters have the names of its free variables, so that they are free again.
    around = parse(f"def around({', '.join((*_HELPERS, *code.co_freevars))}): pass").body[0]
    assert isinstance(around, ast.FunctionDef)
    # It gets another name: its own, which a recursive function calls, is to stay a global name.
    function.name = "__simulated_function__"
    around.body = [function]
    module = compile(ast.Module([around], []), filename, "exec", dont_inherit=True)
    return _constant(_constant(module, "around"), function.name).replace(co_name=code.co_name)


def _constant(code: CodeType, name: str) -> CodeType:
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)


def rewrite(function: FunctionType, lines: list[str]) -> FunctionType:
    """The Python function that stands for the kernel ``function``. ``lines``: see `lines_of`."""
    original = function.__code__
    source = "".join(inspect.getblock(lines))
    shadowed = _BUILTINS & {*function.__globals__, *original.co_varnames, *original.co_freevars}
    with _one_thread:
        code = _rewritten_code(original, original.co_filename, source, shadowed, refused.globals_of_the_host(function))
    cells = {name: CellType(helper) for name, helper in _HELPERS.items()}
    cells.update(zip(original.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in code.co_freevars)
    result = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    result.__kwdefaults__ = function.__kwdefaults__
    # The name in Python's errors about missing arguments.
    result.__qualname__ = function.__qualname__.rpartition("<locals>.")[2]
    return result
