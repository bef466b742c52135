"""Every kernel of the repository compiles for every target, with wide accesses and ordered releases."""

import importlib
import re
import sys
from pathlib import Path

import pytest
from covering import EVERYTHING, thorough
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

from codegen.collective_arguments import (
    BF16,
    COLLECTIVES,
    ELEMENTS,
    FLOAT32,
    INT32,
    INT64,
    W,
    collective_in_tuples,
)
from codegen.expert_arguments import EXPERT_KERNELS, arguments_in
from codegen.offline import TARGETS, by_turns, compile_for, targets_by_turns
from codegen.operations import is_barrier, is_data, releases
from codegen.row_arguments import OF_ROWS, rows_for, rows_in_tuples
from iris.ccl.atomic import atomic
from iris.ccl.broadcast import broadcast
from iris.ccl.exchange import exchange
from iris.ccl.exchange_v import exchange_v
from iris.ccl.kernel_launch import ALL_REGISTERS, MOST_REGISTERS, SMALL_LAUNCH, leaving_room
from iris.ccl.lamport_channel import BLOCK_BYTES, MOST_WARPS, WARP_BYTES
from iris.ccl.one_hop import one_hop
from iris.ccl.one_shot import one_shot
from iris.ccl.pull import pull
from iris.ccl.ring import ring
from iris.ccl.two_shot import two_shot
from iris.ccl.two_shot_direct import two_shot_direct
from iris.ccl.two_shot_push import two_shot_push
from iris.ops.kernel_arguments import (
    Channel,
    Epilogue,
    Matrix,
    Sending,
    Tiling,
)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# Where kernels are defined, and the folder from which the file imports its neighbours.
FILES = [
    *(ROOT / "iris").rglob("*.py"),
    *(ROOT / "examples").rglob("*.py"),
    *(ROOT / "benchmarks").rglob("*.py"),
]

# An argument for each parameter that a kernel may have.
ARGUMENTS = {
    "context_tensor": INT64,
    "heap_bases": INT64,
    **dict.fromkeys(["source", "target", "inbox", "result", "slots", "remote_target"], FLOAT32),
    **dict.fromkeys(["flag", "flags", "full", "taken", "arrived", "counter"], INT32),
    **dict.fromkeys(["links", "out"], INT64),
    **dict.fromkeys(["n", "times", "steps", "rounds"], 4096),
    **dict.fromkeys(["rank", "peer", "num_ranks", "round", "first"], 3),
    "BLOCK": 2048,
    "VECTOR": 4,
}
# The fused operations': matrices by rows, all multiples of 16, and tiles of the default configuration.
OPERATIONS = {
    "out_context": INT64,
    "counts": INT32,
    **dict.fromkeys(["gathered", "parts", "a", "b", "bias", "out"], BF16),
    **dict.fromkeys(["scale_a", "scale_b"], None),
    **dict.fromkeys(["M", "m", "N", "K", "share", "stride_am", "stride_bk", "stride_om"], 4096),
    **dict.fromkeys(["stride_ak", "stride_bn", "stride_on", "XCDS", "CHUNK"], 1),
    **{"W": W, "SENDERS": 8, "SEND_M": 16, "SEND_K": 1024, "BLOCK_M": 256, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP": 8},
    **dict.fromkeys(["CACHE_A", "CACHE_B"], ""),
    **{"ALLOW_TF32": True, "BIASED": True, "SCALED": False, "ALL_REDUCE": True},
    **{"WHAT": "signal ready", "BLOCK": 2048},
}
# What notes when a transfer between hosts began and ended.
RAIL_TIMES = {
    **dict.fromkeys(["taken", "rows"], INT64),
    **{"place": INT64, "number": 3, "ns": 4096, "ROOM": 1 << 16, "WORDS": 3},
}
# A link's chain is followed, and counters counted, one element at a time.
# How an element lies to the words it is moved as is known on the device alone.
SCALAR = {
    "exchange_times",
    "exchange_v",
    *("read_clock", "hold", "note_beginning", "note_end"),
    *("meet", "handshake", "signal_peer", "await_peer"),
    "ping_pong",
    "chase",
    "count_up",
    "count",
    "_barrier_kernel",
}


def load(file):
    if ROOT / "iris" in file.parents:
        return importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    sys.path.insert(0, str(file.parent))
    try:
        spec = importlib.util.spec_from_file_location(f"{file.parent.name}_{file.stem}".replace("-", "_"), file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(file.parent))


# The first parameters of kernels of the library.
FIRST = [["context_tensor"], ["channel"], ["queues"]]


def is_launched(function):
    """Of the functions that the files of collectives, fused operations, experts and tiles define."""
    return function.arg_names[:1] in FIRST or function.fn.__name__ == "add_parts" or function in EXPERT_KERNELS


def kernels():
    """The kernels that each file defines: jitted functions that are launched, not called from others.

    But those for one GPU alone and the larger examples: see test_hopper_kernels.py, test_cdna3_kernels.py and
    test_example_kernels.py.
    """
    for file in FILES:
        if any((folder / "README.md").exists() for folder in file.parents if EXAMPLES in folder.parents):
            continue
        text = file.read_text()
        if "jit" not in text or file.name == "__main__.py" or {"language", "hopper", "cdna3"} & set(file.parts):
            continue
        module = load(file)
        for name, value in vars(module).items():
            if not isinstance(value, (JITFunction, GluonJITFunction)):
                continue
            if {"ccl", "ops", "experts", "x"} & set(file.relative_to(ROOT).parts) and not is_launched(value):
                continue
            if Path(value.fn.__code__.co_filename) == file:
                yield f"{file.relative_to(ROOT)}:{name}", value
                if hasattr(value, "gluon"):
                    yield f"{file.relative_to(ROOT)}:{name}.gluon", value.gluon


def with_targets(kernels):
    for number, (name, kernel) in enumerate(kernels):
        for target in targets_by_turns(number):
            yield pytest.param(target, kernel, id=f"{target}-{name}")


def arguments_of(kernel, **instead):
    """One for each of its parameters: of those that have another here, ``instead``."""
    place = Path(kernel.fn.__code__.co_filename)
    given = ARGUMENTS
    if place.parent.name == "ccl":
        given = given | COLLECTIVES | ELEMENTS.get(place.stem, {})
    elif place.stem in OF_ROWS:
        given = given | OPERATIONS | rows_for(place.stem)
    elif place.parent.name in ("ops", "distributed"):
        given = given | OPERATIONS
    given = given | arguments_in(place.parent.name)
    if kernel.fn.__name__ == "count_up":
        given = given | {"counter": INT64}
    if place.parent.name == "tracing":
        given = given | {"times": INT64, "ROUNDS": 8, "LEADS": True} | RAIL_TIMES
    given |= instead
    if place.parent.name == "ccl":
        given |= collective_in_tuples(kernel, given)
    if place.stem in OF_ROWS:
        given |= rows_in_tuples(place.stem, given)
    elif place.parent.name == "ops" and "channel" in kernel.arg_names:
        given |= in_tuples(given)
    return [given[name] for name in kernel.arg_names]


def in_tuples(given):
    """The arguments of a fused operation's kernel that are tuples, of what ``given`` has by the names of old."""
    sending = Sending(*(given[name] for name in ("SENDERS", "SEND_M", "SEND_K")))
    tiling = Tiling(**{name: given[name] for name in Tiling._fields})
    # Of a gathered A rows are known to have no gaps.
    strides = {"a": ("stride_am", "stride_ak"), "b": ("stride_bk", "stride_bn"), "out": ("stride_om", "stride_on")}
    return {
        "channel": Channel(given["context_tensor"], given["counts"]),
        "epilogue": Epilogue(given["bias"], given["scale_a"], given["scale_b"]),
        **{name: Matrix(given[name], *(given[each] for each in both)) for name, both in strides.items()},
        **{"SENDING": sending, "TILING": tiling},
    }


COMPILED = list(with_targets(kernels()))


@pytest.mark.parametrize(("target", "kernel"), COMPILED)
def test_kernel(target, kernel):
    place = Path(kernel.fn.__code__.co_filename)
    compiled = compile_for(target, kernel, *arguments_of(kernel))
    operations = compiled.operations()
    if kernel.fn.__name__ not in SCALAR:
        assert any(map(is_data, operations)), operations
    if place.parent.name in ("ccl", "ops", "experts", "low_latency"):
        # Their loops are laid out in another order than they run in, so before that: in one straight piece of code.
        lines = compiled.ttgir.splitlines()
        for i, line in enumerate(lines):
            if " release, " in line:
                before = [each for each in lines[max(0, i - 25) : i] if "barrier" in each or "tt.store" in each]
                assert before and "barrier" in before[-1], lines[max(0, i - 25) : i + 1]
        return
    for release in releases(operations):
        before = operations[:release]
        stores = [i for i, each in enumerate(before) if is_data(each) and "st" in each]
        assert any(map(is_barrier, before[stores[-1] + 1 if stores else 0 :])), operations


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", [atomic, atomic.gluon])
def test_accumulators_are_added_to_without_a_lock(target, kernel):
    code = compile_for(target, kernel, *arguments_of(kernel, LOCKED=False)).ttgir
    assert re.search(r"atomic_rmw fadd, relaxed, sys, .*tensor<4096x", code) and "atomic_cas" not in code


MULTIPLIED = {
    "triton one_shot push": one_shot,
    "gluon two_shot push": two_shot_push.gluon,
    "triton two_shot": two_shot,
    "gluon two_shot direct": two_shot_direct.gluon,
    "triton pull": pull,
    "triton ring": ring,
    "gluon atomic": atomic.gluon,
}


@pytest.mark.parametrize("kernel", by_turns([*MULTIPLIED.values()])[: None if EVERYTHING else 1])
def test_inputs_are_multiplied_and_added_apart(kernel):
    """As fused, the product would not be rounded, and every variant might do it for another term of a sum."""
    arguments = arguments_of(kernel, OP="premul_sum", factors=FLOAT32)
    code = compile_for("sm_90", kernel, *arguments, enable_fp_fusion=False).text
    assert re.search(r"mul(\.rn)?\.f32", code) and "fma.rn.f32" not in code
    plain = compile_for("sm_90", kernel, *arguments_of(kernel)).text
    assert not re.search(r"mul(\.rn)?\.f32", plain)


@pytest.mark.parametrize("kernel", [one_hop, one_hop.gluon])
def test_words_of_a_broadcast_travel_two_at_a_time(kernel):
    code = compile_for("sm_90", kernel, *arguments_of(kernel, ROOTED=True)).text
    assert "st.global.v2.b64" in code and "ld.volatile.global.v2.b64" in code
    assert not re.search(r"st\.global\.b64|ld\.volatile\.global\.b64", code)


@pytest.mark.parametrize("kernel", [one_shot, one_shot.gluon])
def test_parts_of_all_ranks_are_under_way_together(kernel):
    code = compile_for("sm_90", kernel, *arguments_of(kernel, PART=256), num_warps=1).instructions()
    loads = [i for i, line in enumerate(code) if "LDG.E.128.STRONG" in line]
    # Between the loads of the first and of the last part nothing waits for one: there is not room for what would.
    assert len(loads) == W and loads[-1] - loads[0] < 16, "\n".join(code[loads[0] : loads[-1]])


ROOMY = {
    "triton exchange": exchange,
    "triton exchange_v": exchange_v,
    "triton two_shot": two_shot,
    "triton two_shot direct": two_shot_direct,
    "triton pull": pull,
    "triton broadcast": broadcast,
    "triton ring": ring,
}


# The assembler takes seconds for each: in `make test` one by each Triton.
@pytest.mark.parametrize("kernel", by_turns([*ROOMY.values()] if EVERYTHING else [two_shot, broadcast]))
def test_programs_leave_room_for_others(kernel):
    """Also where they have the parts of eight ranks in registers."""
    assert 8 * registers_of_a_warp(kernel, arguments_of(kernel, W=8), 8, **leaving_room(8 * 32)) <= MOST_REGISTERS


def registers_of_a_warp(kernel, arguments, warps, **options):
    """For programs of so many warps; all threads get them by eights."""
    code = compile_for("sm_90", kernel, *arguments, num_warps=warps, **options).instructions()
    return 32 * -(-(1 + max(int(number) for line in code for number in re.findall(r"\bR(\d+)\b", line))) // 8) * 8


def pushing(kernel, size, part_bytes, early):
    """Arguments of a push of bf16 among so many ranks."""
    return arguments_of(kernel, W=size, RANKS=size, PART=part_bytes // 2, ONE_EACH=early, EARLY=early)


PUSHES = {
    "triton one_shot push": one_shot,
    "gluon one_shot push": one_shot.gluon,
    "triton two_shot push": two_shot_push,
    "gluon two_shot push": two_shot_push.gluon,
}


def largest_part(size):
    """Bytes at most, as of `part_bytes`, which asks a GPU how many threads a warp has."""
    return BLOCK_BYTES // size * (2 if size == 2 else 1)


def warps_for(part):
    return min(part // WARP_BYTES, MOST_WARPS)


@pytest.mark.parametrize("size", [2, thorough(4)])
@pytest.mark.parametrize("kernel", by_turns([*PUSHES.values()]))
def test_pushes_leave_room_for_those_of_another_stream(kernel, size):
    """Of the two programs of each multiprocessor, half of the registers where they are largest."""
    part = largest_part(size)
    warps = warps_for(part)
    assert 2 * warps * registers_of_a_warp(kernel, pushing(kernel, size, part, False), warps) <= ALL_REGISTERS // 2


@pytest.mark.parametrize("size", [2, thorough(4)])
@pytest.mark.parametrize("kernel", by_turns([*PUSHES.values()]))
def test_small_pushes_leave_room_for_the_next_one_too(kernel, size):
    assert 2 * registers_of_a_warp(kernel, pushing(kernel, size, WARP_BYTES, True), 1) <= SMALL_LAUNCH


@pytest.mark.parametrize("kernel", by_turns([one_hop, one_hop.gluon]))
def test_one_hop_leaves_room_for_the_next_one_too(kernel):
    assert 4 * registers_of_a_warp(kernel, arguments_of(kernel), 4) <= SMALL_LAUNCH


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("kernel", by_turns([*PUSHES.values(), one_hop, one_hop.gluon]))
def test_the_next_launch_is_let_in_only_where_there_is_room(kernel, early):
    code = compile_for("sm_90", kernel, *arguments_of(kernel, EARLY=early)).text
    assert ("griddepcontrol.launch_dependents" in code) == early


def test_versions_of_a_kernel_have_different_cache_keys():
    """Their text is one, and the compiler keeps no binaries of Triton and of Gluon apart but by what they call."""
    both = {name: kernel for name, kernel in kernels() if hasattr(kernel, "gluon")}
    assert both and all(kernel.cache_key != kernel.gluon.cache_key for kernel in both.values())


def test_no_kernel_is_missing():
    """The examples, the benchmarks, the demo and the library have kernels of their own, and they were found."""
    found = [name for name, _ in kernels()]
    for place in (
        "iris/runtime/device_barrier",
        "iris/ccl/atomic",
        "iris/ccl/exchange",
        "iris/ccl/pull",
        "iris/ccl/one_shot",
        "iris/ccl/ring",
        "iris/ccl/two_shot",
        "iris/ccl/two_shot_direct",
        "iris/ccl/two_shot_push",
        "iris/demo",
        "iris/experts/combine",
        "iris/experts/dispatch",
        "iris/experts/low_latency/combine",
        "iris/experts/low_latency/dispatch",
        "iris/ops/all_gather_matmul",
        "iris/ops/copies",
        "iris/ops/matmul_all_gather",
        "iris/ops/matmul_reduce",
        "examples/01_store",
        "examples/06_message",
        "benchmarks/",
    ):
        assert any(each.startswith(place) for each in found), (place, found)


@pytest.mark.parametrize(
    ("target", "kernel"),
    [each for each in COMPILED if re.search("exchange.py|broadcast|two_shot.py|pull|push|ring", each.id)],
)
def test_where_peers_are_is_looked_up_before_the_loops(target, kernel):
    lines = compile_for(target, kernel, *arguments_of(kernel)).ttgir.splitlines()
    begin = next(i for i, line in enumerate(lines) if " scf.for " in line)
    # The tables of bases are the only memory of int64 that is read one word at a time.
    indent = len(lines[begin]) - len(lines[begin].lstrip())
    end = next(i for i in range(begin + 1, len(lines)) if lines[i].startswith(" " * indent + "}"))
    assert not [line for line in lines[begin:end] if re.search(r"tt\.load .* : !tt\.ptr<i64>", line)]


@pytest.mark.parametrize(
    ("target", "kernel"),
    [each for each in COMPILED if re.search("sm_90-(iris/ccl/|iris/ops/|iris/experts/|iris/device_barrier)", each.id)],
)
def test_launches_that_may_begin_early_wait_before_they_touch_memory(target, kernel):
    code = compile_for(target, kernel, *arguments_of(kernel))
    # Parameters are in memory of their own, which no kernel before this one writes.
    memory = [line for line in code.text.splitlines() if re.search(r"\b(ld|st|atom|red)\.(?!param)|griddep", line)]
    waits = [i for i, line in enumerate(memory) if "griddepcontrol.wait" in line]
    assert len(waits) == 1
    # Of device contexts and the tables of bases, which none writes either, words of int64 are read one at a time.
    assert all("ld.global.b64 " in line for line in memory[: waits[0]]), memory[: waits[0]]
