"""What carries a fused operation where the caller does not say."""

import pytest
import torch

from iris.ops.call import Call
from iris.ops.choose import VENDOR, choose

OPERATIONS = ("all_gather_matmul", "matmul_all_gather", "matmul_reduce_scatter", "matmul_all_reduce")
PROGRAMS = 132  # of an H200


def call(name, M, N, K, dtype=torch.bfloat16, size=4):
    """One rank's part of a product of these sizes, shared as `python -m iris bench ops` does."""
    rows = M // size if "gather" in name else M
    columns, depth = (N // size, K) if name == "all_gather_matmul" else (N, K if "gather" in name else K // size)
    a, b = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((rows, depth), (depth, columns)))
    return Call(name, torch.empty(M, columns, dtype=dtype, device="meta"), a, b, None, None, None)


@pytest.mark.parametrize("name", OPERATIONS)
def test_few_rows_are_not_worth_a_kernel_of_large_tiles(name):
    assert choose(call(name, 64, 8192, 8192), 4, PROGRAMS, True) == VENDOR
    assert choose(call(name, 4096, 8192, 8192), 4, PROGRAMS, True).use_gluon


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(
    "size, dtype, columns, on_gpu",
    [(4, torch.float32, 8192, True), (4, torch.bfloat16, 8196, True), (1, torch.bfloat16, 8192, True),
     (4, torch.bfloat16, 8192, False)],
    ids=["dtype", "alignment", "one rank", "simulator"],
)  # fmt: skip
def test_where_the_kernel_cannot_or_need_not_run(name, size, dtype, columns, on_gpu):
    # 8196 columns of two bytes are no multiple of 16 bytes, of all ranks or of one.
    assert choose(call(name, 4096, columns, 8192, dtype, size), size, PROGRAMS, on_gpu) == VENDOR


def test_tiles_are_narrower_where_wide_ones_leave_multiprocessors_idle():
    # 64 tiles of 256 columns, for 132 multiprocessors.
    assert choose(call("matmul_reduce_scatter", 1024, 2048, 28672), 4, PROGRAMS, True).block_size_n < 256
    assert choose(call("matmul_reduce_scatter", 8192, 28672, 8192), 4, PROGRAMS, True).block_size_n == 256
    # 288 tiles are three rounds for 2.2: the vendor's GEMM has other tiles.
    assert choose(call("matmul_all_gather", 8192, 4608, 36864), 4, PROGRAMS, True) == VENDOR
