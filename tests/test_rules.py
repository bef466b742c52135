"""Rules that only this project must obey: memory ordering in one place, no surprises in destructors, floors."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "iris").rglob("*.py"))


def name(file):
    return str(file.relative_to(ROOT / "iris"))


def code(file):
    """The file without comments and docstrings, so that they may speak of what the code must not do."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = ""
    return ast.unparse(tree)


def files_with(pattern):
    return [name(file) for file in SOURCES if re.search(pattern, code(file))]


def test_only_ordering_and_the_barrier_acquire_and_release():
    # The simulator names the orders that it implements; it issues none.
    found = files_with(r"sem\s*=\s*['\"](acquire|release|acq_rel)['\"]")
    assert found == ["language/barrier.py", "language/ordering.py"]


def test_inline_assembly_is_in_few_files():
    assert [file for file in files_with(r"inline_asm_elementwise\(") if "simulator" not in file] == [
        "language/clock.py",
        "language/cluster.py",
        "language/dependent_launch.py",
        "language/fences.py",
        "language/ordering.py",
        "language/pairs.py",
    ]


def test_counts_are_kept_behind_a_barrier():
    """A warp that loads a count late must not find what another has stored: `store_after_sync`."""
    assert files_with(r"store_after_sync\((row|epochs)\b")
    assert not files_with(r"\bstore\((row|epochs|counts|flags|locks)\b")


def test_a_destructor_only_queues():
    """Garbage collectors run when they like, so nothing collective, blocking or allocating may run in one."""
    assert files_with(r"__del__|weakref\.finalize") == ["heap/lifetime.py"]
    text = code(ROOT / "iris" / "heap" / "lifetime.py")
    life = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "Life")
    end = next(node for node in life.body if isinstance(node, ast.FunctionDef) and node.name == "end")
    calls = {ast.unparse(node.func) for node in ast.walk(end) if isinstance(node, ast.Call)}
    assert calls == {"self._deaths.append", "self._capturing"}


# Who may not be imported by whom: a floor knows only what is below it.
ABOVE = {
    "heap": ["language", "context", "tensors", "workspace", "device_barrier", "demo", "bench"],
    "language": ["context", "tensors", "workspace", "device_barrier", "demo", "bench"],
    "simulator": ["context", "tensors", "workspace", "device_barrier", "language", "demo", "bench"],
    "world": ["heap", "language", "context", "tensors", "workspace"],
    "errors": ["heap", "language", "simulator", "world", "context"],
}


@pytest.mark.parametrize("floor", ABOVE)
def test_a_floor_does_not_import_what_is_above_it(floor):
    for file in SOURCES:
        if name(file).startswith((f"{floor}/", f"{floor}.py")):
            for higher in ABOVE[floor]:
                assert not re.search(rf"(from|import) iris\.{higher}\b", code(file)), (name(file), higher)


# Functions that allocate on a device and keep nothing of it beyond the call, or nothing that has memory.
TEMPORARIES = {
    "capture.py": {"capture_pool"},
    "ccl/collectives.py": {"_factors", "_to_write", "gather", "scatter", "reduce", "take_part"},
    "ccl/communicator.py": {"as_words"},
    "ccl/functional.py": {"_like", "_reduce"},
    "ccl/reduction.py": {"on_device"},
    "context.py": {"make_room"},
    "distributed.py": {"allgather", "alltoall_base", "alltoall", "gather"},
    "heap/mapping.py": {"peer", "snapshot"},
    "heap/symmetric.py": {"empty", "peer"},
    "ops/call.py": {"scales"},
    "ops/functional.py": {"_out", "_rows_like", "_sums_like", "_scales_like"},
    "ops/normalisation.py": {"room"},
    "ops/vendor.py": {
        "_scaled",
        "_factors",
        "_all_gather_matmul",
        "_all_gather_matmul_k",
        "_matmul_all_gather",
        "_matmul_reduce_scatter",
    },
    "tensors.py": {"arange"},
    "tracing/clock.py": {"compare"},
}
MAKES_A_TENSOR = re.compile(r"torch\.(tensor|as_tensor|zeros|ones|empty|full|arange)")
MAKES_ONE_LIKE_ANOTHER = re.compile(r"torch\.\w+_like|.+\.new_(empty|zeros|ones|full)")


def allocators(file):
    """The functions that allocate on a device outside `iris.kept.keep`."""
    found = set()

    def visit(node, function):
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "keep":
                return
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            on_device = given.get("device", "'cpu'") not in ("'cpu'", "'meta'")
            if MAKES_ONE_LIKE_ANOTHER.fullmatch(called) or (MAKES_A_TENSOR.fullmatch(called) and on_device):
                found.add(function)
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(file.read_text()), None)
    return found


def test_what_is_kept_is_allocated_by_keep():
    """Else it may lie in the pool of a graph (iris/kept.py). Who adds a temporary has seen that nothing keeps it."""
    apart = ("bench/", "demo/", "simulator/", "info.py", "kept.py")
    found = {name(file): allocators(file) for file in SOURCES if not name(file).startswith(apart)}
    assert {file: functions for file, functions in found.items() if functions} == TEMPORARIES


def test_device_code_is_at_the_top_level():
    """Written once, by `iris.language.jit`; not made by a function that is called for each language."""
    for file in SOURCES:
        tree = ast.parse(file.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        nested = {inner for outer in functions for inner in ast.walk(outer) if inner is not outer}
        for node in functions:
            jitted = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            assert not (jitted and node in nested), f"{name(file)}:{node.lineno}"


def test_files_with_kernels_keep_their_annotations():
    for file in [*SOURCES, *(ROOT / "examples").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        text = file.read_text()
        assert not (re.search(r"@(\w+\.)?(gluon_)?jit\b", text) and "from __future__ import annotations" in text), file


def test_the_guide_names_every_room_and_nothing_else():
    """Who looks for something finds the file in docs/contributing.md: by its path, or by its name beside its folder."""
    page = (ROOT / "docs" / "contributing.md").read_text()
    told = {"iris/__init__.py"}
    for where, what in re.findall(r"^\| (`iris.*?) \| (.*) \|$", page, re.MULTILINE):
        places = re.findall(r"`([\w/.]+)`", where)
        folder = next((place for place in places if place.endswith("/")), None)
        told |= {place for place in places if place.endswith(".py")}
        told |= {folder + file for file in re.findall(r"`(\w+\.py)`", what) if folder}
    files = {f"iris/{name(file)}" for file in SOURCES if file.name != "__init__.py"}
    assert told == files | {"iris/__init__.py", "iris_backend.py"}


DEVICE_CODE = re.compile(r"\bjit\b|_jit\b|constexpr_function|gluon_version_of")


def test_host_functions_are_annotated():
    """Else mypy would not look into them. What a kernel computes has no types of Python's."""
    for file in [*SOURCES, ROOT / "iris_backend.py"]:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            if any(DEVICE_CODE.search(ast.unparse(decorator)) for decorator in node.decorator_list):
                continue
            given = node.args
            stars = filter(None, (given.vararg, given.kwarg))
            named = [*given.posonlyargs, *given.args, *given.kwonlyargs, *stars]
            bare = [each.arg for each in named if each.annotation is None and each.arg not in ("self", "cls")]
            assert not bare and (node.returns is not None or node.name == "__init__"), f"{file}:{node.lineno}: {bare}"
