"""What the compilers make of the device interface, for GPUs that need not be there. Run with IRIS_SIMULATOR=0."""

import itertools
import os
import re
import subprocess

import pytest
import torch
import triton
import triton.language as tl
from conftest import TESTS, import_path
from covering import EVERYTHING, covering, sample, thorough
from language import atomic_kernels, initialise_kernels
from language.test_atomics import CASES, ORDERS
from language.test_misuse import by_its_class, by_its_class_gluon
from preloaded import python
from tracing.traced_kernels import KERNELS, NAMES

from codegen import device_kernels as kernels
from codegen.offline import TARGETS, compile_for
from codegen.operations import is_acquire, is_barrier, is_data, releases
from iris.gluon import IrisDeviceCtx

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
FORMS = ["triton_1d", "triton_2d", "triton_functional", "gluon_1d", "gluon_2d", "gluon_functional"]

CONTEXT = torch.zeros(16, dtype=torch.int64)


def exists(target, dtype):
    return target.startswith("gfx") or dtype not in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def tensors(dtype):
    # Of the size of a few elements: AMD's compiler treats tensors below 2 GiB specially, and must not truncate
    # distances.
    return torch.zeros(64, dtype=torch.uint8).view(dtype), torch.zeros(64, dtype=torch.uint8).view(dtype)


def access(form, dtype, masked):
    """A kernel that loads and stores blocks of which each thread has 16 bytes at a time, and its arguments."""
    per_thread = 16 // dtype.itemsize
    block = 16 * 32 * per_thread if form.endswith("2d") else 4096
    of_layout = (per_thread,) if form.startswith("gluon") else ()
    return getattr(kernels, form), (CONTEXT, *tensors(dtype), 4096, 1, block, masked, *of_layout)


def data_accesses(compiled):
    """Loads and stores of the kernel's data: all but the scalar loads of the context's table (64-bit)."""
    if compiled.is_ptx:
        operations = [op for op in compiled.operations() if op.startswith(("ld.global", "st.global"))]
        return [op for op in operations if op != "ld.global.b64"]
    operations = [op for op in compiled.operations() if re.match(r"(global|buffer)_(load|store)", op)]
    return [op for op in operations if op not in ("global_load_dwordx2", "buffer_load_dwordx2")]


@pytest.mark.parametrize(
    ("target", "form", "dtype", "masked"),
    covering(TARGETS, FORMS, DTYPES, [False, True], where=lambda target, form, dtype, masked: exists(target, dtype)),
)
def test_remote_accesses_are_16_bytes_wide(target, form, dtype, masked):
    kernel, arguments = access(form, dtype, masked)
    accesses = data_accesses(compile_for(target, kernel, *arguments))
    assert any("st" in op for op in accesses) and any("l" in op and "ld" in op or "load" in op for op in accesses)
    wide = r"(ld|st)\.global[\w.:]*\.(v4\.b32|v2\.b64)|(global|buffer)_(load|store)_dwordx4"
    assert all(re.fullmatch(wide, op) for op in accesses), accesses


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    "form", ["triton_1d", "triton_2d", "triton_functional", "gluon_1d", "triton_scalar", "gluon_scalar"]
)
def test_no_distance_between_heaps_is_truncated_to_32_bits(target, form):
    source, destination = tensors(torch.float32)
    if form.endswith("scalar"):
        compiled = compile_for(target, getattr(kernels, form), CONTEXT, source, destination, 1)
    else:
        options = {"PER_THREAD": 4} if form.startswith("gluon") else {}
        kernel = getattr(kernels, form)
        compiled = compile_for(target, kernel, CONTEXT, source, destination, 64, 1, BLOCK=1024, MASKED=True, **options)
    # Buffer operations address with 32-bit offsets; a peer is reached with 64-bit addresses.
    assert "buffer_store" not in compiled.ttgir
    assert not re.search(r"arith\.trunci .*: tensor<", compiled.ttgir)
    assert len(re.findall(r"arith\.trunci .*: i64 to i32", compiled.ttgir)) <= 1  # the rank, in the context's table
    assert all(op.startswith("global_") for op in data_accesses(compiled)), data_accesses(compiled)


RELEASES = ["signal", "signal_add", "put_signal", "barrier", "cas", "atomic"]
ACQUIRES = ["wait", "barrier", "cas", "atomic"]


def ordering(language, op):
    """A kernel that does ``op`` after its stores and before its loads, and its arguments."""
    flag = torch.zeros(16, dtype=torch.int32)
    return getattr(kernels, f"{language}_signal_wait"), (CONTEXT, torch.zeros(4096), flag, 7, 1, 1024, op)


def ordering_case(target, language, op):
    kernel, arguments = ordering(language, op)
    return compile_for(target, kernel, *arguments).operations()


@pytest.mark.parametrize(("target", "language", "op"), covering(TARGETS, ["triton", "gluon"], RELEASES))
def test_a_block_barrier_stands_between_the_blocks_stores_and_a_release(target, language, op):
    operations = ordering_case(target, language, op)
    release = releases(operations)[0]
    stores = [i for i, operation in enumerate(operations[:release]) if is_data(operation)]
    assert stores
    between = operations[stores[-1] + 1 : release]
    assert any(map(is_barrier, between)), operations
    if target.startswith("gfx"):
        assert "buffer_wbl2" in between
        barrier = next(i for i, operation in enumerate(between) if is_barrier(operation))
        assert "s_waitcnt vmcnt(0)" in between[:barrier], "a wave's stores are not drained before the barrier"


@pytest.mark.parametrize(("target", "language", "op"), covering(TARGETS, ["triton", "gluon"], ACQUIRES))
def test_a_block_barrier_stands_between_an_acquire_and_what_the_block_does_next(target, language, op):
    operations = ordering_case(target, language, op)
    # The first: where it is a loop, the text may hold the repetition anywhere.
    acquire = next(i for i, operation in enumerate(operations) if is_acquire(operation))
    loads = [i for i, operation in enumerate(operations) if i > acquire and is_data(operation)]
    assert loads
    assert any(map(is_barrier, operations[acquire + 1 : loads[0]])), operations


@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_a_fence_is_of_system_scope_and_followed_by_a_barrier(language):
    operations = ordering_case("sm_90", language, "fence")
    fence = operations.index("fence.acq_rel.sys")
    assert any(map(is_barrier, operations[fence:]))
    operations = ordering_case("gfx942", language, "fence")
    fence = operations.index("buffer_wbl2")
    assert any(map(is_barrier, operations[fence:]))


@pytest.mark.parametrize(("language", "op"), covering(["triton", "gluon"], ["signal", "wait", "cas", "atomic"]))
def test_the_default_scope_is_the_system(language, op):
    flags = [o for o in ordering_case("sm_90", language, op) if re.search("release|acquire|acq_rel", o)]
    assert flags and all(".sys" in operation for operation in flags), flags


def test_a_translated_pointer_keeps_base_loads_out_of_the_loop():
    compiled = compile_for("sm_90", kernels.triton_hoisted, CONTEXT, torch.zeros(4096), 4096, 1, BLOCK=1024)
    operations = compiled.operations()
    assert operations.count("ld.global.b64") <= 3  # rank, own base, the peer's base
    assert operations.index("st.global.v4.b32") > max(i for i, op in enumerate(operations) if op == "ld.global.b64")


@pytest.mark.parametrize("kernel", [kernels.triton_is_local, kernels.gluon_is_local])
def test_which_ranks_are_local_is_read_from_the_table(kernel):
    operations = compile_for("sm_90", kernel, CONTEXT, torch.zeros(4096), 3, BLOCK=128).operations()
    memory = [operation for operation in operations if operation.startswith(("ld", "st"))]
    # The base of the one rank, those of the block, one a thread; and the store.
    assert memory == ["ld.global.b64", "ld.global.b64", "st.global.b32"]


ATOMIC_FORMS = ["triton_context", "triton_functional", "gluon_context", "gluon_functional"]


def atomics():
    """Every atomic of every dtype in every form, and orders by turns; in `make test-all`, every combination."""
    axes = TARGETS, ATOMIC_FORMS, CASES
    if EVERYTHING:
        return list(itertools.product(*axes, ORDERS))
    return [(*case, order) for case, order in zip(sample(*axes), itertools.cycle(ORDERS), strict=False)]


def atomic(form, case, order):
    """A kernel that does this atomic, and its arguments."""
    operation, dtype = case
    data = torch.zeros(64, dtype=torch.uint8).view(dtype)
    return getattr(atomic_kernels, form), (CONTEXT, CONTEXT, data, data, data, 300, 0, 1, operation, *order, 128)


@pytest.mark.parametrize(("target", "form", "case", "order"), atomics())
def test_every_atomic_compiles_for_every_dtype(target, form, case, order):
    kernel, arguments = atomic(form, case, order)
    compiled = compile_for(target, kernel, *arguments)
    assert re.search(r"\b(atom|red)\.global|(global|buffer)_atomic", compiled.text)


CHECKED = """
import re, sys
import torch
from codegen import device_kernels as kernels
from codegen.offline import compile_for
context, data = torch.zeros(16, dtype=torch.int64), torch.zeros(4096)
for form in sys.argv[4:]:
    options = {"PER_THREAD": 4} if form.startswith("gluon") else {}
    for masked in sys.argv[3].split():
        arguments = context, data, data, 64, 1
        masks = {"BLOCK": 1024, "MASKED": masked == "masked"}
        compiled = compile_for(sys.argv[1], getattr(kernels, form), *arguments, **masks, **options)
        print(bool(re.search(sys.argv[2], compiled.text)))
for kernel in (kernels.triton_scalar, kernels.gluon_scalar):
    print(bool(re.search(sys.argv[2], compile_for(sys.argv[1], kernel, context, data, data, 1).text)))
"""


@pytest.mark.parametrize("target", ["sm_90", thorough("gfx942")])
def test_kernels_with_checked_pointers_compile(target):
    environment = {**os.environ, "IRIS_DEBUG": "1", "PYTHONPATH": import_path(TESTS)}
    masks = ["masked", *(["whole"] if EVERYTHING else [])]
    # The claim of the record is an atomic maximum; a store or a load has none.
    claim = r"atom\.global\S*\.max\.|global_atomic_smax"
    forms = FORMS if EVERYTHING else FORMS[1::2]
    command = [*python(), "-c", CHECKED, target, claim, " ".join(masks), *forms]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert printed == ["True"] * (len(forms) * len(masks) + 2)


CLOCK = {"sm_90": "%globaltimer", "sm_100": "%globaltimer", "gfx942": "s_memrealtime", "gfx950": "s_memrealtime"}


def everything(language, traced):
    """A kernel that does all that is traced, and its arguments."""
    numbers, flags, words = (torch.zeros(4096, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.int64))
    return KERNELS[language], (words, numbers, flags, flags, 100, 128, traced)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("language", KERNELS)
@pytest.mark.parametrize("traced", [False, True])
def test_only_a_traced_kernel_reads_the_clock(target, language, traced):
    kernel, arguments = everything(language, traced)
    code = compile_for(target, kernel, *arguments).text
    # Once where each event begins, and once where it ends; AMD's assembly has the line in other forms besides.
    assert code.count(CLOCK[target]) >= 2 * len(NAMES) if traced else CLOCK[target] not in code


CLOCKS_OF_A_WAIT = """
import sys
import torch
from codegen import device_kernels
from codegen.offline import compile_for
flag = torch.zeros(16, dtype=torch.int32)
for target, clock in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    for kernel in (device_kernels.triton_signal_wait, device_kernels.gluon_signal_wait):
        for op in ("wait", "barrier"):
            arguments = flag.long(), torch.zeros(4096), flag, 7, 1
            print(clock in compile_for(target, kernel, *arguments, BLOCK=1024, OP=op).text)
"""


@pytest.mark.parametrize("limit", ["", thorough("2.5"), *(["0"] if EVERYTHING else [])])
def test_only_a_wait_with_a_limit_reads_the_clock(limit):
    environment = {**os.environ, "IRIS_WAIT_TIMEOUT_S": limit or "0", "PYTHONPATH": import_path(TESTS)}
    if not limit:
        del environment["IRIS_WAIT_TIMEOUT_S"]
    targets = [word for target in ("sm_90", "gfx942") for word in (target, CLOCK[target])]
    command = [*python(), "-c", CLOCKS_OF_A_WAIT, *targets]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert printed == [str(limit == "2.5")] * 8


REDUCED_IN_A_WAIT = """
import re
import sys
import torch
from codegen import device_kernels
from codegen.offline import compile_for
words = torch.zeros(16, dtype=torch.int64)
for target in sys.argv[1:]:
    ttgir = compile_for(target, device_kernels.few_words, words, torch.zeros(16, dtype=torch.int32), words).ttgir
    sizes = re.findall(r"tt.reduce.*?\\(tensor<(\\d+)x", ttgir, flags=re.S)
    print(*sizes)
"""


def test_a_block_leaves_a_wait_with_a_limit_together():
    """What decides is reduced over all threads, though the words are few: a look at the clock has barriers in it."""
    environment = {**os.environ, "IRIS_WAIT_TIMEOUT_S": "2.5", "PYTHONPATH": import_path(TESTS)}
    command = [*python(), "-c", REDUCED_IN_A_WAIT, "sm_90", "gfx950"]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(printed) == 2
    for sizes in printed:
        assert sizes.split() and min(map(int, sizes.split())) >= 1024


def test_a_context_that_is_made_by_its_class_alone_is_told_by_the_compiler():
    with pytest.raises(triton.CompilationError, match=r"write DeviceContext\.initialize\("):
        compile_for("sm_90", by_its_class, CONTEXT)
    with pytest.raises(triton.CompilationError, match=r"write IrisDeviceCtx\.initialize\("):
        compile_for("gfx942", by_its_class_gluon, CONTEXT, IrisDeviceCtx)


@triton.jit
def of_fp8(x, out, OP: tl.constexpr):
    i = tl.arange(0, 16)
    a, b = tl.load(x + i), tl.load(x + 16 + i)
    if OP == "scaled":
        a = a * 2.0 + 1.5
    elif OP == "negative":
        a = -a
    elif OP == "larger":
        a = tl.maximum(a, b)
    elif OP == "chosen":
        a = tl.where(a == b, a, b)
    elif OP == "scanned":
        a = tl.cumsum(a, 0)
    tl.store(out + i, tl.abs(a))


@pytest.mark.parametrize("op", ["scaled", "negative", "larger", "chosen", "scanned", "absolute"])
@pytest.mark.parametrize("target, dtype", [("sm_90", torch.float8_e4m3fn), ("gfx942", torch.float8_e4m3fnuz)])
def test_what_the_simulator_refuses_of_fp8_does_not_compile(target, dtype, op):
    x = torch.zeros(64, dtype=torch.uint8).view(dtype)
    if op == "absolute":
        compile_for(target, of_fp8, x, x, op)
    else:
        with pytest.raises((RuntimeError, triton.CompilationError)):
            compile_for(target, of_fp8, x, x, op)


def initialisation(language, form, traced):
    """A kernel that makes a context in this way, and its arguments."""
    seen = torch.zeros(16, dtype=torch.int32)
    return getattr(initialise_kernels, f"{language}_initialise"), (CONTEXT, seen, 3, 4, form, traced)


@pytest.mark.parametrize("form", range(8))
@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_a_context_is_initialised_in_either_order(language, form):
    for target in ("sm_90", "gfx942"):
        for traced in (False, True):
            kernel, arguments = initialisation(language, form, traced)
            # The contexts that are traced are counted.
            counted = bool(re.search(r"atom|red\.global", compile_for(target, kernel, *arguments).text))
            assert counted == (traced and form > 0)
