"""out[r] = A[r] B[g], for the rows r of each group g: grouped GEMM in Triton, for every platform.

Two limits of a call of R rows in E groups: 2 R K N operations, and the bytes of the weights that are used, E K N times
the size of an element, which are read once. On H200 (989 TFLOP/s of bf16, 1979 of fp8; 4.8 TB/s) a group needs 206 rows
of bf16, or 412 of fp8, before the operations take longer. Below that a tile has as many rows as a group, up to 128, so
that no weight is read twice; above it tiles of GROUP rows of tiles share columns of B, and of A, in the L2 cache.

Programs find their tiles from counts on the device (`iris.ops.grouped.groups`). Rows of no group are neither read nor
written. Sums are formed in float32, and rounded once, after scales and activation.
"""

import triton
import triton.language as tl

from iris.language.dependent_launch import gdc_wait
from iris.ops.gemm import precision, remap_xcd, swizzle_tile
from iris.ops.grouped.groups import group_of, rows_of
from iris.ops.grouped.kernel_arguments import SCALE_BLOCK

SCALED_TOGETHER = tl.constexpr(SCALE_BLOCK)


@triton.jit
def factors_of_rows(scale, group, rows, inside, block):
    """What these rows of A are multiplied by, as columns; of a block of A's columns."""
    at = scale.ptr + group * scale.group_stride + rows * scale.row_stride + block * scale.column_stride
    return tl.load(at, mask=inside, other=0)[:, None]


@triton.jit
def factors_of_columns(scale, group, columns, inside, block, TOGETHER: tl.constexpr):
    """What these columns of B are multiplied by, as rows; of a block of B's rows."""
    number = columns // TOGETHER
    at = scale.ptr + group * scale.group_stride + number * scale.row_stride + block * scale.column_stride
    return tl.load(at, mask=inside, other=0)[None, :]


@triton.jit
def product_of(left, right, total, TILING: tl.constexpr, APART: tl.constexpr):
    """``total`` plus the product of one step; ``APART``: the product alone."""
    rounding: tl.constexpr = precision(TILING.ALLOW_TF32)
    if APART:
        return tl.dot(left, right, input_precision=rounding)
    else:
        # As in `iris.ops.gemm.product`: Hopper adds up products of fp8 with few bits, so not more than one step's.
        return tl.dot(left, right, total, input_precision=rounding, max_num_imprecise_acc=TILING.BLOCK_K)


# A number of rows or groups may be 1, and is no constant then.
@triton.jit(do_not_specialize=["room", "E"])
def grouped_matmul(a, b, scale_a, scale_b, groups, out, room, E, N, K, FORM: tl.constexpr, TILING: tl.constexpr):
    """``a``, ``b``, ``out``, ``scale_a``, ``scale_b``: each a `GroupedMatrix`; ``groups``: a `GroupedRows`.

    ``room``: as in `rows_of`. ``N``: columns of ``out``; with ``FORM.GATED`` B has twice as many. Scales are float32,
    or their ``ptr`` is None: of A for rows and blocks of columns; of B for columns, or blocks of these, and for blocks
    of rows. A stride of 0 is for what shares a scale.
    """
    gdc_wait()
    BLOCK_M: tl.constexpr = TILING.BLOCK_M
    BLOCK_K: tl.constexpr = TILING.BLOCK_K
    GATED: tl.constexpr = FORM.GATED
    APART: tl.constexpr = FORM.BLOCKED
    TOGETHER: tl.constexpr = FORM.COLUMNS_A_SCALE
    # Columns of out in a tile: of B each of them is two with a gate.
    COLUMNS: tl.constexpr = TILING.BLOCK_N // 2 if GATED else TILING.BLOCK_N
    tiles_n = tl.cdiv(N, COLUMNS)
    group_numbers = tl.arange(0, FORM.GROUPS)
    _, counts = rows_of(groups, group_numbers, E, room)
    ends = tl.cumsum(tl.cdiv(counts, BLOCK_M) * tiles_n, axis=0)
    tiles, programs = tl.max(ends, axis=0), tl.num_programs(0)
    k = tl.arange(0, BLOCK_K)
    for number in range(remap_xcd(tl.program_id(0), programs, TILING.XCDS, TILING.CHUNK), tiles, programs):
        found, before = group_of(number, ends)
        first, count = rows_of(groups, found, E, room)
        pid_m, pid_n = swizzle_tile(number - before, tl.cdiv(count, BLOCK_M), tiles_n, TILING.GROUP)
        in_group = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        inside_m = in_group < count
        group, rows = found.to(tl.int64), (first + in_group).to(tl.int64)
        columns = pid_n * COLUMNS + tl.arange(0, COLUMNS)
        inside_n = columns < N
        wide = columns.to(tl.int64)
        x = a.ptr + group * a.group_stride + (rows[:, None] * a.row_stride + k.to(tl.int64)[None, :] * a.column_stride)
        y = b.ptr + group * b.group_stride + (k.to(tl.int64)[:, None] * b.row_stride + wide[None, :] * b.column_stride)
        step_a, step_b = tl.cast(a.column_stride, tl.int64) * BLOCK_K, tl.cast(b.row_stride, tl.int64) * BLOCK_K
        to_right = tl.cast(b.column_stride, tl.int64) * N
        total = tl.zeros((BLOCK_M, COLUMNS), dtype=tl.float32)
        right_total = total
        for begin in range(0, K, BLOCK_K):
            here = k < K - begin
            left = tl.load(x, mask=inside_m[:, None] & here[None, :], other=0.0, cache_modifier=TILING.CACHE_A)
            mask_b = here[:, None] & inside_n[None, :]
            right = tl.load(y, mask=mask_b, other=0.0, cache_modifier=TILING.CACHE_B)
            product = product_of(left, right, total, TILING=TILING, APART=APART)
            if GATED:
                right = tl.load(y + to_right, mask=mask_b, other=0.0, cache_modifier=TILING.CACHE_B)
                right_product = product_of(left, right, right_total, TILING=TILING, APART=APART)
            if APART:
                block = begin // SCALED_TOGETHER
                if scale_a.ptr is not None:
                    of_rows = factors_of_rows(scale_a, group, rows=rows, inside=inside_m, block=block)
                    product *= of_rows
                    if GATED:
                        right_product *= of_rows
                if scale_b.ptr is not None:
                    product *= factors_of_columns(
                        scale_b, group, columns=wide, inside=inside_n, block=block, TOGETHER=TOGETHER
                    )
                    if GATED:
                        right_product *= factors_of_columns(
                            scale_b, group, columns=wide + N, inside=inside_n, block=block, TOGETHER=TOGETHER
                        )
                total += product
                if GATED:
                    right_total += right_product
            else:
                total = product
                if GATED:
                    right_total = right_product
            x += step_a
            y += step_b
        if not APART:
            if scale_a.ptr is not None:
                of_rows = factors_of_rows(scale_a, group, rows=rows, inside=inside_m, block=0)
                total *= of_rows
                right_total *= of_rows
            if scale_b.ptr is not None:
                total *= factors_of_columns(scale_b, group, columns=wide, inside=inside_n, block=0, TOGETHER=TOGETHER)
                if GATED:
                    right_total *= factors_of_columns(
                        scale_b, group, columns=wide + N, inside=inside_n, block=0, TOGETHER=TOGETHER
                    )
        if GATED:
            total = total / (1 + tl.exp(-total)) * right_total
        at = out.ptr + group * out.group_stride + (rows[:, None] * out.row_stride + wide[None, :] * out.column_stride)
        tl.store(at, total, mask=inside_m[:, None] & inside_n[None, :])
