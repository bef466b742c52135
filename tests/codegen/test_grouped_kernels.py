"""The kernels of grouped GEMMs compile to products by matrix cores, and what is chosen for Hopper spills nothing."""

import re
from unittest import mock

import pytest
import torch

from codegen.offline import OLDEST, TARGETS, assembly_for, by_turns, compile_for
from iris.ops.grouped.call import GroupedCall
from iris.ops.grouped.launch import portable_tiles, triton_arguments
from iris.ops.grouped.matmul import grouped_matmul
from iris.ops.kernel_arguments import by_name
from iris.ops.portable import TritonKernels

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
        config = portable_tiles(given)
        return by_name(grouped_matmul, **triton_arguments(given, config)), TritonKernels.options(config)


def spilled(compiled):
    """The instructions that access the memory in which registers are kept that there is no room for."""
    return [line for line in compiled.instructions() if re.search(r"\b(STL|LDL)\b", line)]


PRODUCTS = {"sm_90": r"wgmma\.mma_async", "sm_100": r"tcgen05\.mma|mma\.sync", "gfx": "v_mfma_f32|v_smfmac"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", by_turns(CASES), ids=lambda case: described(*case))
def test_in_triton(target, case):
    arguments, options = in_triton(target, *case)
    compiled = compile_for(target, grouped_matmul, *arguments, **options)
    # Tiles of 16 rows are multiplied by a warp's instructions, without warp groups.
    narrow = "|mma.sync" if case[1] < 64 else ""
    assert re.search(PRODUCTS[target[:3] if target.startswith("gfx") else target] + narrow, compiled.text)
    assert compiled.shared <= SHARED_MEMORY[target]
    if target.startswith("sm"):
        memory = [line for line in compiled.text.splitlines() if re.search(r"\b(ld|st)\.global|griddep", line)]
        assert ["griddepcontrol.wait" in line for line in memory] == [True] + [False] * (len(memory) - 1)
    if target == "sm_90":
        # Tiles of A and B are copied 16 bytes at a time, while others are multiplied.
        copies = re.findall(r"cp\.async\.\w+\.shared\.global [^;]*", compiled.text)
        assert copies and all("0x10" in each for each in copies)


# The assembler takes seconds for each.
@pytest.mark.parametrize("case", CASES[0 if OLDEST else 1 :: 2], ids=lambda case: described(*case))
def test_what_is_chosen_for_hopper_spills_nothing(case):
    arguments, options = in_triton("sm_90", *case)
    assert not spilled(compile_for("sm_90", grouped_matmul, *arguments, **options))


def test_groups_are_found_without_a_walk():
    """A tile's group comes of vectors in registers: one loop over tiles, one over the depth, and none over groups."""
    arguments, options = in_triton("sm_90", *CASES[0])
    text = assembly_for("sm_90", grouped_matmul, *arguments, **options)
    assert len(set(re.findall(r"@%p\d+ bra \t?\$(\w+)", text))) < 8
