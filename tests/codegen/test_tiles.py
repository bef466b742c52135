"""The code of tile primitives: 16-byte accesses for peers as for this rank, and locks that are released in order."""

import re

import pytest
import torch
from covering import thorough
from triton.compiler.errors import CompilationError
from x import tile_kernels
from x.method_kernels import operate

from codegen.offline import TARGETS, compile_for
from codegen.operations import is_data
from iris.errors import IrisError
from iris.x.methods import METHODS

INT64, INT32 = torch.zeros(4096, dtype=torch.int64), torch.zeros(4096, dtype=torch.int32)
BF16 = torch.zeros(4096, dtype=torch.bfloat16)
M, N, BLOCK = 4096, 8192, (64, 128)

CALLS = {
    "all_gather rows": (tile_kernels.all_gather, (BF16, BF16, M, N, 4 * M, N, N, 1, 0)),
    "all_gather columns": (tile_kernels.all_gather, (BF16, BF16, M, N, M, 4 * N, 4 * N, 1, 1)),
    "all_to_all": (tile_kernels.all_to_all, (BF16, BF16, BF16, M, N, N // 4, N, 1, N, 1, False)),
    "gather": (tile_kernels.gather, (BF16, BF16, M, N, N, 1, 1)),
    **{
        f"all_reduce {variant}": (
            tile_kernels.all_reduce,
            (BF16, BF16, BF16, locks, M, N, N, 1, N, 1, 1024, 1024, variant, variant != "two_shot"),
        )
        for variant, locks in (("one_shot", INT64), ("two_shot", INT32), ("atomic", INT32), ("spinlock", INT64))
    },
    "reduce_scatter": (
        tile_kernels.reduce_scatter,
        (BF16, BF16, BF16, INT32, M, N, N, 1, N, 1, M // 4, 1024, 1024, 1024, True),
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("target", TARGETS)
def test_tile(target, call):
    """Wide loads and stores, sums in float32, and a block barrier between the stores of a block and its release."""
    kernel, arguments = CALLS[call]
    compiled = compile_for(target, kernel, INT64, *arguments, *BLOCK)
    operations = compiled.operations()
    wide = [each for each in operations if is_data(each)]
    assert any("ld" in each or "load" in each for each in wide), operations
    # Elements are added to atomically two at a time at most.
    assert any("st" in each for each in wide) or call == "all_reduce atomic", operations
    sums = [line for line in compiled.ttgir.splitlines() if "arith.addf" in line]
    assert all("xf32" in line for line in sums), sums
    assert bool(sums) == (
        call in {"all_reduce one_shot", "all_reduce two_shot", "all_reduce spinlock", "reduce_scatter"}
    )
    lines = compiled.ttgir.splitlines()
    for i, line in enumerate(lines):
        if " release, " in line:
            before = [each for each in lines[max(0, i - 25) : i] if "barrier" in each or "tt.store" in each]
            assert before and "barrier" in before[-1], lines[max(0, i - 25) : i + 1]


@pytest.mark.parametrize("what", tile_kernels.MISTAKES)
def test_what_does_not_fit_is_told(what):
    with pytest.raises(CompilationError) as caught:
        compile_for("sm_90", tile_kernels.mistaken, INT64, BF16, INT32, M, N, what, *BLOCK)
    reason = caught.value
    while reason.__cause__:
        reason = reason.__cause__
    assert isinstance(reason, IrisError) and re.match(tile_kernels.MISTAKES[what], str(reason))


def operation_by(operation, method):
    return INT64, BF16, BF16, BF16, INT32, BF16, operation, method, 16, 2


# Methods are made of functions by one loop.
@pytest.mark.parametrize("operation", [thorough(name) if number % 3 else name for number, name in enumerate(METHODS)])
def test_a_method_is_its_function_in_the_generated_code(operation):
    texts = [compile_for("sm_90", operate, *operation_by(operation, method)).operations() for method in (False, True)]
    assert texts[0] == texts[1]
