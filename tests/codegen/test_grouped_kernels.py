"""The kernels of grouped GEMMs compile to products by matrix cores, and what is chosen for Hopper spills nothing."""

import re
from unittest import mock

import pytest
import torch
from covering import EVERYTHING

from codegen.expert_arguments import EXPERTS
from codegen.offline import SAMPLED, TARGETS, assembly_for, by_turns, compile_for, one_of_each
from iris.experts.token_rows import DISPATCHED, UNWEIGHTED
from iris.ops.combine_in_stages import NUM_WARPS as STAGED_WARPS
from iris.ops.combine_in_stages import REGISTERS, combine_in_stages
from iris.ops.grouped import activation_gradient as gradient
from iris.ops.grouped import launch, sums
from iris.ops.grouped.call import GroupedCall
from iris.ops.grouped.launch import launch_of, portable_tiles
from iris.ops.grouped.matmul import grouped_matmul
from iris.ops.grouped.on_hopper import hopper_tiles, problem
from iris.ops.grouped.quantise import NUM_WARPS, arguments_of, quantise_rows
from iris.ops.grouped.stages import progress_of, stages_of
from iris.ops.hopper import arguments as hopper
from iris.ops.kernel_arguments import by_name

E, K, N = 8, 1024, 2048
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
SHARED_MEMORY = {"sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}


def call(dtype, rows, scales, activation=None, expanded=False):
    """With a weight ``[E, N, K]``, and as many rows for each group."""
    shape = (E, rows) if expanded else (E * rows,)
    numbers = torch.zeros(E, dtype=torch.int32)
    scale_a = {"none": None, "lines": torch.empty(shape), "blocks": torch.empty(*shape, K // 128)}[scales]
    scale_b = {"none": None, "lines": torch.empty(E, N), "blocks": torch.empty(E, N // 128, K // 128)}[scales]
    return GroupedCall(
        out=torch.empty(*shape, N // (2 if activation else 1), dtype=dtype if dtype.itemsize > 1 else BF16),
        mat_a=torch.empty(*shape, K, dtype=dtype),
        mat_b=torch.empty(E, N, K, dtype=dtype).transpose(1, 2),
        offs=None if expanded else numbers,
        counts=numbers,
        scale_a=scale_a,
        scale_b=scale_b,
        activation=activation,
    )


# What is multiplied, how many rows a group has, its scales, the activation, and whether groups have matrices.
CASES = [
    (BF16, 1024, "none", None, False),
    (BF16, 16, "none", "silu_and_mul", True),
    (torch.float16, 64, "lines", None, False),
    (torch.float32, 128, "none", None, True),
    (FP8, 1024, "blocks", None, False),
    (FP8, 32, "blocks", "silu_and_mul", True),
    (FP8, 128, "lines", "silu_and_mul", False),
]


def described(dtype, rows, scales, activation, expanded):
    """The case, for its name."""
    what = [str(dtype).removeprefix("torch."), f"{rows} rows a group", "scales " + scales]
    return ", ".join(what + ["gated"] * bool(activation) + ["expanded"] * expanded)


def in_triton(target, *case):
    """Arguments and options, as chosen for a GPU of this target."""
    with mock.patch.object(torch.version, "hip", "7.0" if target.startswith("gfx") else None):
        given = call(*case)
        kernel, arguments, options = launch_of(given, portable_tiles(given))
        return by_name(kernel, **arguments), options


def spilled(compiled):
    """The instructions that access the memory in which registers are kept that there is no room for."""
    return [line for line in compiled.instructions() if re.search(r"\b(STL|LDL)\b", line)]


PRODUCTS = {"sm_90": r"wgmma\.mma_async", "sm_100": r"tcgen05\.mma|mma\.sync", "gfx": "v_mfma_f32|v_smfmac"}


def takes_long(target, case):
    """The compiler makes fp8 that this GPU has not of other instructions, for seconds."""
    return target == "gfx942" and case[0] == FP8 and not EVERYTHING


@pytest.mark.parametrize(
    ("case", "target"),
    [(case, target) for case in by_turns(CASES) for target in SAMPLED if not takes_long(target, case)],
    ids=lambda value: value if isinstance(value, str) else described(*value),
)
def test_in_triton(target, case):
    arguments, options = in_triton(target, *case)
    compiled = compile_for(target, grouped_matmul, *arguments, **options)
    instruction = PRODUCTS[target[:3] if target.startswith("gfx") else target]
    if target.startswith("sm") and case[0] == torch.float32:
        # As torch's products of float32 are, if nothing else is said.
        instruction = "fma.rn.f32"
    elif case[1] < 64:
        # Tiles of 16 rows are multiplied by a warp's instructions, without warp groups.
        instruction += "|mma.sync"
    assert re.search(instruction, compiled.text)
    assert compiled.shared <= SHARED_MEMORY[target]
    if target.startswith("sm"):
        memory = [line for line in compiled.text.splitlines() if re.search(r"\b(ld|st)\.global|griddep", line)]
        assert ["griddepcontrol.wait" in line for line in memory] == [True] + [False] * (len(memory) - 1)
    if target == "sm_90":
        # Tiles of A and B are copied 16 bytes at a time, while others are multiplied.
        copies = re.findall(r"cp\.async\.\w+\.shared\.global [^;]*", compiled.text)
        assert copies and all("0x10" in each for each in copies)


HOPPER_CASES = [
    (BF16, 1024, "none", None, False),
    (BF16, 1024, "none", "silu_and_mul", True),
    (torch.float16, 64, "lines", None, True),
    (FP8, 1024, "blocks", None, False),
    (FP8, 64, "blocks", "silu_and_mul", True),
    (FP8, 1024, "lines", "silu_and_mul", False),
    (BF16, 1024, "lines", "silu_and_mul", False),
]


def on_hopper(*case, by_rows=False):
    """As chosen there: kernel, arguments and options."""
    given = call(*case)
    if by_rows:
        given = given._replace(mat_b=given.mat_b.contiguous())
    with mock.patch.object(hopper, "is_hopper", return_value=True):
        config = hopper_tiles(given)
        assert problem(given, config) is None
    kernel, arguments, options = launch_of(given, config)
    return kernel, by_name(kernel, **arguments), options


def of_hopper(case):
    kernel, arguments, options = on_hopper(*case)
    return compile_for("sm_90", kernel, *arguments, **options)


@pytest.mark.parametrize("case", by_turns(HOPPER_CASES), ids=lambda case: described(*case))
def test_in_gluon(case):
    dtype, _, scales, activation, _ = case
    compiled = of_hopper(case)
    narrow = dtype == FP8
    # With 64 rows a group, tiles are narrower, so that there are more of them. With scales of blocks each of two parts
    # of B, which a gate's halves are too, has products of its own.
    parts = 2 if narrow and scales == "blocks" else 1
    columns = 64 if case[1] == 64 else 128 if narrow or scales != "none" else 256
    name = "e4m3.e4m3" if narrow else {BF16: "bf16.bf16", torch.float16: "f16.f16"}[dtype]
    # Two multipliers, each with the products of a stage of 128 bytes.
    instruction = rf"wgmma\.mma_async\S*m64n{columns}k\d+\.f32\.{name}"
    products = re.findall(rf"{instruction} .*, (\S+), 1, 1(?:, \d, \d)?;", compiled.text)
    assert len(products) == 8 * parts
    # Of fp8 the first of a stage begins with zero.
    assert not narrow or [each == "0" for each in products] == 2 * parts * [True, False, False, False]
    # Both halves of A's tile, and B: with a gate both halves of its columns.
    fetched = compiled.text.count("cp.async.bulk.tensor.2d.shared")
    assert fetched == (4 if activation or parts == 2 else 3)
    # The writer stores 16 bytes at a time.
    assert set(re.findall(r"st\.global\S*", compiled.text)) == {"st.global.v4.b32"}
    assert compiled.shared <= SHARED_MEMORY["sm_90"]
    memory = [line for line in compiled.text.splitlines() if re.search(r"\b(ld|st)\.global|griddep", line)]
    assert ["griddepcontrol.wait" in line for line in memory] == [True] + [False] * (len(memory) - 1)


@pytest.mark.thorough
def test_b_by_rows_in_gluon():
    kernel, arguments, options = on_hopper(BF16, 1024, "none", None, False, by_rows=True)
    assert "m64n256k16.f32.bf16.bf16" in compile_for("sm_90", kernel, *arguments, **options).text


# The assembler takes seconds for each: in `make test` one by each Triton.
LARGE = (BF16, 1024, "none", None, False), (FP8, 1024, "blocks", None, False)


@pytest.mark.parametrize("case", by_turns(HOPPER_CASES if EVERYTHING else LARGE), ids=lambda case: described(*case))
def test_what_is_chosen_in_gluon_spills_nothing(case):
    assert not spilled(of_hopper(case))


@pytest.mark.parametrize("case", by_turns(CASES if EVERYTHING else LARGE), ids=lambda case: described(*case))
def test_what_is_chosen_for_hopper_spills_nothing(case):
    arguments, options = in_triton("sm_90", *case)
    assert not spilled(compile_for("sm_90", grouped_matmul, *arguments, **options))


def with_progress(*case):
    """As on H200, with a kernel beside it."""
    numbers = torch.zeros(16, dtype=torch.int32)
    given = call(*case)._replace(progress=progress_of(numbers))
    with (
        mock.patch.object(hopper, "is_hopper", return_value=True),
        mock.patch.object(launch, "programs", return_value=132),
    ):
        kernel, arguments, options = launch_of(given, hopper_tiles(given))
    return kernel, by_name(kernel, **arguments), options


@pytest.mark.parametrize("case", by_turns([HOPPER_CASES[0], HOPPER_CASES[3]]), ids=lambda case: described(*case))
def test_a_product_beside_another_kernel(case):
    """It lets the next one begin after its own wait, counts tiles by release, and spills no sums for it."""
    kernel, arguments, options = with_progress(*case)
    compiled = compile_for("sm_90", kernel, *arguments, **options)
    control = re.findall(r"griddepcontrol\.\w+", compiled.text)
    assert control == ["griddepcontrol.wait", "griddepcontrol.launch_dependents"]
    # That it has begun, and each tile.
    assert sorted(re.findall(r"gpu\.release\.(add|exch)", compiled.text)) == ["add", "exch"]
    # Two parts of B take all registers of a multiplier. Triton 3.6's assembler spills one more of each thread then, its
    # number, which is read once a tile.
    words = {re.search(r"\[R1.*?\]", line)[0] for line in spilled(compiled)}
    assert len(words) <= (case[0] == FP8)


def in_stages(weighted):
    """Arguments beside a product of tiles of 128 x 256."""
    given = {name: EXPERTS[name] for name in ("slot", "layout", "y", "out", "EXTENTS")}
    numbers = torch.zeros(16, dtype=torch.int32)
    given["staged"] = numbers
    of_product = {"progress": progress_of(numbers), "tiles_n": 28, "BLOCK_M": 128}
    constants = {
        "BLOCK": 4096,
        "WEIGHTS": (DISPATCHED if weighted else UNWEIGHTED).value,
        "STAGES": stages_of(EXPERTS["EXTENTS"].LOCAL),
    }
    return by_name(combine_in_stages, **given, **of_product, **constants)


@pytest.mark.parametrize(("target", "weighted"), one_of_each(TARGETS, [True, False]))
def test_combine_in_stages(target, weighted):
    options = {"maxnreg": REGISTERS} if target.startswith("sm") else {}
    compiled = compile_for(target, combine_in_stages, *in_stages(weighted), num_warps=STAGED_WARPS, **options)
    wide = r"(?:global|buffer)_load_dwordx4" if target.startswith("gfx") else r"ld\.global\.v4\.b32"
    # Of each choice, to be sent and to be finished.
    assert len(re.findall(wide, compiled.text)) >= 2 * EXPERTS["EXTENTS"].K
    if target == "sm_90":
        # Triton 3.6 spills one register, outside of the loops over a row.
        assert len(spilled(compiled)) <= 4
        # It waits for what it uses, and for the end of the product alone at its own.
        assert compiled.text.count("griddepcontrol.wait") == 1
        assert compiled.text.index("griddepcontrol.wait") > compiled.text.rindex("st.global")


def of_quantise(target, columns):
    """Of an activation of bf16."""
    narrow = torch.float8_e4m3fnuz if target == "gfx942" else FP8
    x, numbers = torch.empty(64, columns, dtype=BF16), torch.zeros(E, dtype=torch.int32)
    return arguments_of(x, x.to(narrow), torch.empty(64, -(-columns // 128)), numbers, numbers)


@pytest.mark.parametrize(("target", "columns"), one_of_each(TARGETS, [2048, 144]))
def test_activations_are_rounded_by_16_bytes(target, columns):
    text = compile_for(target, quantise_rows, *of_quantise(target, columns), num_warps=NUM_WARPS).text
    wide = r"(global|buffer)_load_dwordx4" if target.startswith("gfx") else r"ld\.global\.v4\.b32"
    assert re.search(wide, text)
    if target.startswith("sm"):
        # Of eight elements that a thread has loaded together.
        assert "st.global.v2.b32" in text or "st.global.v4.b32" in text


def of_gradient(columns, gated):
    """The kernel, and its arguments for an activation of bf16."""
    hidden, of_row = torch.empty(64, columns * (1 + gated), dtype=BF16), torch.empty(64, columns, dtype=BF16)
    factors, numbers = torch.empty(64), torch.zeros(E, dtype=torch.int32)
    rows = gradient.OfRows(hidden, of_row, factors, of_row, hidden, factors)
    return gradient.activation_gradient, gradient.arguments_of(rows, numbers, numbers)


def of_empty_groups():
    offsets = torch.zeros(E + 1, dtype=torch.int32)
    return sums.zero_empty_groups, (torch.empty(E, K, N, dtype=BF16), offsets, K * N, sums.BLOCK)


GRADIENTS = [(of_gradient, 768, True), (of_gradient, 48, True), (of_gradient, 768, False), (of_empty_groups,)]


@pytest.mark.parametrize(("target", "case"), one_of_each(TARGETS, GRADIENTS))
def test_gradients_access_16_bytes_and_spill_nothing(target, case):
    make, *given = case
    kernel, arguments = make(*given)
    compiled = compile_for(target, kernel, *arguments, num_warps=4)
    wide = r"(global|buffer)_store_dwordx4" if target.startswith("gfx") else r"st\.global\.v4\.b32"
    assert re.search(wide, compiled.text)
    assert not target.startswith("sm") or not spilled(compiled)


def test_groups_are_found_without_a_walk():
    """A tile's group comes of vectors in registers: one loop over tiles, one over the depth, and none over groups."""
    arguments, options = in_triton("sm_90", *CASES[0])
    text = assembly_for("sm_90", grouped_matmul, *arguments, **options)
    assert len(set(re.findall(r"@%p\d+ bra \t?\$(\w+)", text))) < 8
