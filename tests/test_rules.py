"""Rules that only this project must obey: memory ordering in one place, no surprises in destructors, floors."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "iris").rglob("*.py"))


def name(file):
    return str(file.relative_to(ROOT / "iris"))


tree_of = functools.cache(lambda file: ast.parse(file.read_text()))
nodes_of = functools.cache(lambda tree: tuple(ast.walk(tree)))  # a walk takes longer than to read a file


@functools.cache
def code(file):
    """The file without comments and docstrings, so that they may speak of what the code must not do."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = ""
    return ast.unparse(tree)


def files_with(pattern):
    # To take comments out takes long, and most files have no such text at all.
    return [name(file) for file in SOURCES if re.search(pattern, file.read_text()) and re.search(pattern, code(file))]


def test_only_ordering_the_barrier_and_traces_acquire_and_release():
    # Traces hand a row on, from one program to the next. The simulator names the orders that it implements; it issues
    # none.
    found = files_with(r"sem\s*=\s*['\"](acquire|release|acq_rel)['\"]")
    assert found == [f"language/{file}.py" for file in ("barrier", "ordering", "trace_buffer", "tracing")]


# Where a frame only says which line a report is to name.
NAME_A_PLACE = {
    "failures/process_end.py",
    "heap/history.py",
    "sanitizer/recorder.py",
    "simulator/hang.py",
    "simulator/lines.py",
    "simulator/shared_memory.py",
    "world/inspection.py",
}
# Where it says more than a place, and why nothing else does.
SAY_MORE = {
    "distributed/group.py": "torch asks a property, which must answer split_group() otherwise than other callers",
    "sanitizer/host_recorder.py": "whether the host looks at a flag in a loop: its Python runs as the user wrote it",
    "sanitizer/locks.py": "who makes a lock: those of the program are looked at, and those of libraries are not",
    "sanitizer/distributed_calls.py": "whether torch's Python or C++ has called: what C++ starts, it waits for there",
    "sanitizer/threads.py": "who starts a thread, the program or a library: nothing else tells them apart",
    "sanitizer/waits.py": "what the host compares with what it has seen: see `wait_of_host`",
    "simulator/interrupts.py": "what a signal interrupts: Python hands this frame to the handler",
}
FRAME = r"_getframe|\.f_(back|code|lineno|globals|locals|builtins)\b|\.tb_frame\b|extract_stack|_current_frames"


def test_frames_name_places():
    """What code means, it says itself: device functions by `note`, loops of kernels as they are rewritten."""
    assert files_with(FRAME) == sorted(NAME_A_PLACE | SAY_MORE.keys())
    assert files_with(r"\.f_locals\b|\beval\(") == ["sanitizer/waits.py"]
    assert files_with(r"\bimport dis\b|\bfrom dis\b|\.f_lasti\b|\.co_code\b|settrace|setprofile|sys\.monitoring") == []


def test_inline_assembly_is_in_few_files():
    assert [file for file in files_with(r"inline_asm_elementwise\(") if "simulator" not in file] == [
        "language/clock.py",
        "language/cluster.py",
        "language/dependent_launch.py",
        "language/fences.py",
        "language/lamport_poll.py",
        "language/ll_poll.py",
        "language/ordering.py",
        "language/pairs.py",
    ]


def test_counts_are_kept_after_a_barrier():
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
    assert calls == {"self.deaths.append", "self._capturing"}


# Functions that allocate on a device and keep nothing of it beyond the call, or nothing that has memory.
TEMPORARIES = {
    "ccl/all_to_all_v_over_hosts.py": {"_agree", "exchange_over_hosts"},
    "ccl/chunks.py": {"two_buffers"},
    "ccl/enqueue.py": {"_factors", "to_write"},
    "ccl/functional.py": {"_like", "_reduce"},
    "ccl/kernel_launch.py": {"as_words"},
    "ccl/over_hosts.py": {"all_reduce", "all_to_all"},
    "ccl/reduction.py": {"own_factor"},
    "ccl/rooted.py": {"take_part"},
    "ccl/span.py": {"_spread", "all_reduce", "begin", "finish"},
    "cuda_graphs/capture.py": {"capture_pool"},
    "distributed/__init__.py": {"_gather_into", "alltoall_base", "alltoall", "gather"},
    "experts/calls.py": {"choices", "room_for"},
    "experts/choices.py": {"first_choices", "numbers_of_choices", "sums_of_rows"},
    "experts/over_hosts.py": {"_before", "_gather", "_gather_weights", "_prepare_all", "choices", "combine", "receive"},
    "experts/functional.py": {"_combine_back", "_dispatch", "_like_combine", "_like_dispatch", "scaled"},
    "heap/mapping.py": {"peer", "snapshot"},
    "heap/pool.py": {"empty", "peer", "_from_torch"},
    "heap/symmetric.py": {"empty", "peer"},
    "inductor/operators.py": {None, "all_reduce_add_rms_norm", "_rows_and_scales"},
    "inductor/symm_mem.py": {"_gather", "_scales_of_all_ranks", "_scatter"},
    "integrations/transformers/experts.py": {"_forward"},
    "ops/call.py": {"scales"},
    "ops/experts_functional.py": {"_backward", "_like", "_like_backward", "_multiply", "experts_mlp"},
    "ops/experts_mlp.py": {"scratch_of"},
    "ops/functional.py": {"_out", "_out_and_a", "_all_gather_matmul_return_a_back"},
    "ops/grouped/activation_gradient.py": {"differentiate_activation"},
    "ops/grouped/launch.py": {"_new"},
    "ops/norm_operators.py": {"_rows_like", "_sums_like", "_scales_like"},
    "ops/normalisation.py": {"_by_owners", "room"},
    "ops/over_hosts.py": {"_matmul_all_reduce", "_matmul_reduce_scatter", "_two_buffers"},
    "ops/vendor.py": {
        "_scaled",
        "_factors",
        "_all_gather_matmul",
        "_all_gather_matmul_k",
        "_matmul_all_gather",
        "_matmul_reduce_scatter",
    },
    "tensors.py": {"arange"},
    "tracing/between_hosts.py": {"gather_files"},
    "tracing/clock.py": {"compare"},
    "tracing/host_clocks.py": {"_exchange"},
    "world/nccl_rail.py": {"_connect"},
    "world/object_broadcast.py": {"make_room"},
}
MAKES_A_TENSOR = re.compile(r"torch\.(tensor|as_tensor|zeros|ones|empty|full|arange)")
MAKES_ONE_LIKE_ANOTHER = re.compile(r"torch\.\w+_like|.+\.new_(empty|zeros|ones|full)")


def allocators(file):
    """The functions that allocate on a device outside `iris.cuda_graphs.kept.keep`."""
    found = set()
    if not re.search(f"{MAKES_A_TENSOR.pattern}|{MAKES_ONE_LIKE_ANOTHER.pattern}", file.read_text()):
        return found

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

    visit(tree_of(file), None)
    return found


def test_what_is_kept_is_allocated_by_keep():
    """Else it may lie in the pool of a graph. Who adds a temporary has seen that nothing keeps it."""
    apart = ("bench/", "demo/", "simulator/", "sanitizer/", "info.py", "cuda_graphs/kept.py")
    found = {name(file): allocators(file) for file in SOURCES if not name(file).startswith(apart)}
    assert {file: functions for file, functions in found.items() if functions} == TEMPORARIES


# A file has one idea, and is read in one sitting.
LINES = 400


def test_files_are_read_in_one_sitting():
    folders = ("iris", "tests", "examples", "scripts", "benchmarks")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 500
    assert not [str(file.relative_to(ROOT)) for file in files if len(file.read_text().splitlines()) > LINES]


def test_ruff_lays_out_the_code():
    assert not [name(file) for file in SOURCES if re.search("# fmt: (skip|off)", file.read_text())]


def on_device(node):
    """Whether a definition is of a device function, or of an aggregate, whose methods are device functions."""
    return any(re.search("jit|aggregate", ast.unparse(decorator)) for decorator in node.decorator_list)


def test_device_code_is_at_the_top_level():
    """Written once, by `iris.language.jit`; not made by a function that is called for each language."""
    for file in SOURCES:
        tree = tree_of(file)
        functions = [node for node in nodes_of(tree) if isinstance(node, ast.FunctionDef)]
        nested = {inner for outer in functions for inner in ast.walk(outer) if inner is not outer}
        for node in functions:
            assert not (node in nested and on_device(node)), f"{name(file)}:{node.lineno}"


# Parameters that a device function may have: what belongs together is a NamedTuple, as in iris/ops/kernel_arguments.py
# and iris/ccl/kernel_arguments.py.
MOST_PARAMETERS = 14


def test_device_functions_have_few_parameters():
    found = [
        (name(file), node.name)
        for file in SOURCES
        for node in nodes_of(tree_of(file))
        if isinstance(node, ast.FunctionDef) and on_device(node)
        if len(node.args.args) + len(node.args.kwonlyargs) > MOST_PARAMETERS
    ]
    assert not found


# Arguments that device code may give by position: of more, who reads the call does not know which is which.
MOST_BY_POSITION = 4
# Who takes any number of arguments of one kind.
VARIADIC = {"check_choice"}


def calls_by_position(tree):
    """The calls in device code with too many arguments by position. `gl.warp_specialize` has them in tuples."""
    for definition in nodes_of(tree):
        if isinstance(definition, (ast.FunctionDef, ast.ClassDef)) and on_device(definition):
            for node in ast.walk(definition):
                if isinstance(node, ast.Call) and len(node.args) > MOST_BY_POSITION:
                    if ast.unparse(node.func) not in VARIADIC:
                        yield node.lineno


def test_device_code_names_arguments():
    calls = "f(a, b, c, d)\n f(a, b, c, d, e)\n f(a, b, c, d, e=e)"
    assert list(calls_by_position(ast.parse(f"@jit\ndef k():\n {calls}"))) == [4], "what the finder finds"
    others = [file for folder in ("examples", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    files = [*SOURCES, *others]
    assert not [f"{file}:{line}" for file in files for line in calls_by_position(tree_of(file))]


def test_files_with_kernels_keep_their_annotations():
    for file in [*SOURCES, *(ROOT / "examples").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        text = file.read_text()
        assert not (re.search(r"@(\w+\.)?(gluon_)?jit\b", text) and "from __future__ import annotations" in text), file


def test_the_guide_names_every_room_and_nothing_else():
    """Who looks for something finds the file in docs/contributing.md: by its path, or by its name beside its folder."""
    page = (ROOT / "docs" / "contributing.md").read_text()
    named = {"iris/__init__.py"}
    for where, what in re.findall(r"^\| (`iris.*?) \| (.*) \|$", page, re.MULTILINE):
        places = re.findall(r"`([\w/.]+)`", where)
        folder = next((place for place in places if place.endswith("/")), None)
        named |= {place for place in places if place.endswith(".py")}
        named |= {folder + file for file in re.findall(r"`(\w+\.py)`", what) if folder}
    files = {f"iris/{name(file)}" for file in SOURCES if file.name != "__init__.py"}
    assert named == files | {"iris/__init__.py", "iris_backend.py"}


# Modules of torch and Triton without a leading underscore that their documentation does not promise either.
UNDOCUMENTED = (
    "torch.distributed.distributed_c10d",
    "triton.backends",
    "triton.compiler",
    "triton.language.core",
    "triton.language.semantic",
    "triton.language.standard",
    "triton.runtime.autotuner",
    "triton.runtime.interpreter",
    "triton.runtime.jit",
)
# What begins with an underscore and is Python's own.
OF_PYTHON = {
    "_DummyThread", "_asdict", "_current_frames", "_exit", "_fields", "_fields_", "_getframe", "_lock", "_max_workers",
    "_replace", "_waiters",
}  # fmt: skip


def is_private(path):
    """Whether a dotted path is of torch or Triton, and leads through a part that is not for others."""
    first, *rest = path.split(".")
    hidden = any(part.startswith("_") and not (part.startswith("__") and part.endswith("__")) for part in rest)
    return first in ("torch", "triton") and (
        hidden or f"{path}.".startswith(tuple(f"{each}." for each in UNDOCUMENTED))
    )


def private_parts(tree):
    """The private parts of torch and Triton that a file mentions, with their lines: imported, or by attributes."""
    imported, named = {}, []
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                named.append((each.name, node.lineno))
                imported[each.asname or each.name.split(".")[0]] = each.name if each.asname else each.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                imported[each.asname or each.name] = f"{node.module}.{each.name}"
                named.append((f"{node.module}.{each.name}", node.lineno))

    def path(node):
        if isinstance(node, ast.Name):
            return imported.get(node.id)
        base = path(node.value) if isinstance(node, ast.Attribute) else None
        return base and f"{base}.{node.attr}"

    within = {id(node.value) for node in nodes_of(tree) if isinstance(node, ast.Attribute)}
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and id(node) not in within and path(node):
            named.append((path(node), node.lineno))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "resolve_name")):
            named.append((ast.unparse(node.args[0]).lstrip("f").strip("'\"").replace(":", "."), node.lineno))
    return [(line, part) for part, line in named if is_private(part)]


def test_compat_builds_on_errors_alone():
    """So that every other part of iris may use it."""
    files = [file for file in SOURCES if name(file).startswith("compat/")]
    found = {module for file in files for module in re.findall(r"(?:from|import) (iris[\w.]*)", code(file))}
    assert found == {"iris.compat.parts", "iris.errors"}


def test_private_parts_of_torch_and_triton_are_in_compat():
    """So that there is one place to look into, and a test of it (tests/test_compat.py), when a release moves one."""
    mentions = """
import torch as t, triton.language as tl
from torch._ops import OpOverload
from torch.distributed import distributed_c10d as c10d
from triton.runtime import driver
c10d.default_pg_timeout, t.ops.aten._to_copy.default, tl.core.load, driver.active, t.__version__, tl.load
import_module(f"triton.backends.{vendor}.compiler")
"""
    lines = [line for line, _ in private_parts(ast.parse(mentions))]
    assert sorted(lines) == [3, 4, 6, 6, 6, 7], "what the finder finds"
    sources = [file for file in SOURCES if not name(file).startswith("compat/")]
    found = [(name(file), *part) for file in sources for part in private_parts(tree_of(file))]
    assert not found


def test_private_attributes_are_of_this_library_or_of_python():
    """Of what objects of torch and Triton have, too, as ``operation._schema``."""
    outside = {file: tree_of(file) for file in SOURCES if not name(file).startswith("compat/")}
    own = set(OF_PYTHON)
    for tree in outside.values():
        for node in nodes_of(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
    found = {
        f"{name(file)}:{node.lineno}: {node.attr}"
        for file, tree in outside.items()
        for node in nodes_of(tree)
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr) and node.attr not in own
    }
    assert not found


DEVICE_CODE = re.compile(r"\bjit\b|_jit\b|constexpr_function|gluon_version_of")


def test_host_functions_are_annotated():
    """Else mypy would not look into them. What a kernel computes has no types of Python's."""
    for file in [*SOURCES, ROOT / "iris_backend.py"]:
        for node in nodes_of(tree_of(file)):
            if not isinstance(node, ast.FunctionDef):
                continue
            if any(DEVICE_CODE.search(ast.unparse(decorator)) for decorator in node.decorator_list):
                continue
            given = node.args
            stars = filter(None, (given.vararg, given.kwarg))
            named = [*given.posonlyargs, *given.args, *given.kwonlyargs, *stars]
            bare = [each.arg for each in named if each.annotation is None and each.arg not in ("self", "cls")]
            assert not bare and (node.returns is not None or node.name == "__init__"), f"{file}:{node.lineno}: {bare}"
