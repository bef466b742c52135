"""The multipliers' part of a grouped GEMM: a tile's products, times their scales, through the activation.

Of fp8 the tensor cores add up with fewer bits than float32 has, so each stage's products begin with zero, and are added
here while the other multiplier's are under way: as in `iris.ops.hopper.pipeline.multiply`. With scales for blocks a
stage is as deep as a block, and its products are multiplied before they are added: one fused instruction an element.

To multiply 64 x 128 elements of a stage takes the tensor cores 256 cycles, and to add them up 64 instructions of each
warp: that hides behind the other multiplier's products. What bounds tiles of 128 x 128 of fp8 is the L2 cache. For 512
cycles of products they fetch 32 KiB, 64 bytes a cycle; at 40, on all multiprocessors of an H200, its ports are busy for
83 % of the time. Tiles of 128 x 256 fetch 48. Their sums and as many products have no room in the registers of two
multipliers. So with scales for blocks B's tile has two parts of columns. Their products are formed one after the other,
in the same registers.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from iris.language.address import bytes_of
from iris.language.jit import gluon_jit
from iris.ops.gemm import by_halves
from iris.ops.grouped.kernel_arguments import SCALE_BLOCK
from iris.ops.hopper.pipeline import accumulator, leave_all

SCALED_TOGETHER = gl.constexpr(SCALE_BLOCK)


@gluon_jit
def operands(pipeline, stage, HALF: gl.constexpr, TRANS_B: gl.constexpr):
    left, right = pipeline.tiles_a.index(2 * stage + HALF), pipeline.tiles_b.index(stage)
    if TRANS_B:
        right = right.permute((1, 0))
    return left, right


@gluon_jit
def factors_of_rows(scale, place, like, block, HALF: gl.constexpr):
    """What the products' rows are multiplied by, as a column of them; of a block of A's columns."""
    group, first, count, row, _ = place
    rows = row + HALF * like.shape[0] + gl.arange(0, like.shape[0], gl.SliceLayout(1, like.type.layout))
    begin = scale.ptr + group.to(gl.int64) * scale.group_stride + block * scale.column_stride
    at = begin + (first + rows).to(gl.int64) * scale.row_stride
    return gl.load(at, mask=rows < count, other=0)[:, None]


@gluon_jit
def factors_of_columns(scale, place, like, N, offset):
    """What the products' columns are multiplied by, as a row of them: of columns of B ``offset`` after the tile's."""
    columns = place[4] + gl.arange(0, like.shape[1], gl.SliceLayout(0, like.type.layout))
    begin = scale.ptr + place[0].to(gl.int64) * scale.group_stride
    at = begin + (columns + offset).to(gl.int64) * scale.row_stride
    return gl.load(at, mask=columns < N, other=0)[None, :]


@gluon_jit
def factor_of_block(scale, place, block, offset):
    """The same where all columns of a tile share it, of a block of B's rows."""
    begin = scale.ptr + place[0].to(gl.int64) * scale.group_stride
    return gl.load(begin + (place[4] + offset) // SCALED_TOGETHER * scale.row_stride + block * scale.column_stride)


@gluon_jit
def product_of_stage(pipeline, step, zeros, HALF: gl.constexpr, TILING: gl.constexpr):
    """Of fp8: that of a stage alone, which is free then."""
    S: gl.constexpr = pipeline.tiles_b.shape[0]
    stage = step % S
    mbarrier.wait(pipeline.smem_full.index(stage), step // S & 1)
    left, right = operands(pipeline, stage, HALF=HALF, TRANS_B=TILING.TRANS_B)
    product = warpgroup_mma(left, right, zeros, is_async=True)
    product = warpgroup_mma_wait(0, deps=[product])
    mbarrier.arrive(pipeline.smem_empty.index(stage), count=1)
    return product


@gluon_jit
def sums(pipeline, step, K, zeros, HALF: gl.constexpr, TILING: gl.constexpr):
    """Those of all stages."""
    S: gl.constexpr = pipeline.tiles_b.shape[0]
    BLOCK_K: gl.constexpr = pipeline.tiles_a.shape[2]
    acc = zeros
    for k in range(0, K, BLOCK_K):
        if bytes_of(pipeline.tiles_a.dtype) == 1:
            acc += product_of_stage(pipeline, step, zeros, HALF=HALF, TILING=TILING)
        else:
            stage = step % S
            mbarrier.wait(pipeline.smem_full.index(stage), step // S & 1)
            left, right = operands(pipeline, stage, HALF=HALF, TRANS_B=TILING.TRANS_B)
            product = warpgroup_mma(left, right, acc, is_async=True)
            # One product is always under way. The one before it is over, and so its stage can be filled again.
            acc = warpgroup_mma_wait(1, deps=[product])
            mbarrier.arrive(pipeline.smem_empty.index((step + S - 1) % S), count=1, pred=k > 0)
        step += 1
    if bytes_of(pipeline.tiles_a.dtype) > 1:
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(pipeline.smem_empty.index((step + S - 1) % S), count=1)
    return acc


@gluon_jit
def side_by_side(left, right):
    """One block of the columns of both; no thread gets any from another."""
    return gl.join(left, right).permute((0, 2, 1)).reshape([left.shape[0], 2 * left.shape[1]])


@gluon_jit
def factors_of_stage(place, scale_a, scale_b, like, offset, block, HALF: gl.constexpr):
    """Of the rows of a block of K, of the columns of the tile's first part, and of those ``offset`` after them."""
    of_rows, of_first, of_second = 1.0, 1.0, 1.0
    if scale_a.ptr is not None:
        of_rows = factors_of_rows(scale_a, place, like, block=block, HALF=HALF)
    if scale_b.ptr is not None:
        of_first = factor_of_block(scale_b, place, block, offset=0)
        of_second = factor_of_block(scale_b, place, block, offset=offset)
    return of_rows, of_first, of_second


@gluon_jit
def begin_part(pipeline, stage, zeros, HALF: gl.constexpr, PART: gl.constexpr):
    """Begin the product of a stage's A and a part of its B."""
    PARTS: gl.constexpr = 2 * pipeline.tiles_b.shape[0] // pipeline.tiles_a.shape[0]
    left, right = pipeline.tiles_a.index(2 * stage + HALF), pipeline.tiles_b.index(PARTS * stage + PART)
    return warpgroup_mma(left, right.permute((1, 0)), zeros, is_async=True)


@gluon_jit
def scaled_sums(
    pipeline, place, step, scale_a, scale_b, extents, HALF: gl.constexpr, FORM: gl.constexpr, TILING: gl.constexpr
):
    """The same of fp8 with scales for blocks of K: of each of the tile's parts; of the first, if there is one.

    A stage's scales are loaded after the last products of the stage before. That one's are not needed any more then,
    but as factors: else the loaded ones would be copied over them, and a copy waits for the load.
    """
    S: gl.constexpr = TILING.STAGES
    ROWS: gl.constexpr = pipeline.tiles_a.shape[1]
    COLUMNS: gl.constexpr = TILING.BLOCK_N // TILING.PARTS
    gl.static_assert(pipeline.tiles_a.shape[2] == SCALED_TOGETHER, "a stage is a block of scales")
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator(COLUMNS, pipeline.tiles_a.dtype))
    first, second = zeros, zeros
    blocks = gl.cdiv(extents.K, SCALED_TOGETHER)
    if FORM.GATED:
        offset = extents.N
    else:
        # After the last column there is no second part, and no scale of one.
        offset = gl.where(place[4] + COLUMNS < extents.N, COLUMNS, 0)
    of_rows, of_first, of_second = factors_of_stage(place, scale_a, scale_b, zeros, offset=offset, block=0, HALF=HALF)
    for block in range(blocks):
        stage = step % S
        mbarrier.wait(pipeline.smem_full.index(stage), step // S & 1)
        first_factors, second_factors = of_rows * of_first, of_rows * of_second
        product = begin_part(pipeline, stage, zeros, HALF=HALF, PART=0)
        if TILING.PARTS == 2:
            first += warpgroup_mma_wait(0, deps=[product]) * first_factors
            product = begin_part(pipeline, stage, zeros, HALF=HALF, PART=1)
        # After the last one, that one once more.
        following = gl.minimum(block + 1, blocks - 1)
        of_rows, of_first, of_second = factors_of_stage(
            place, scale_a, scale_b, zeros, offset=offset, block=following, HALF=HALF
        )
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(pipeline.smem_empty.index(stage), count=1)
        if TILING.PARTS == 2:
            second += product * second_factors
        else:
            first += product * first_factors
        step += 1
    return first, second


@gluon_jit
def results(
    pipeline, place, step, scale_a, scale_b, extents, HALF: gl.constexpr, FORM: gl.constexpr, TILING: gl.constexpr
):
    """A half of a tile of the result, in float32."""
    ROWS: gl.constexpr = pipeline.products.shape[2]
    COLUMNS: gl.constexpr = TILING.BLOCK_N
    if FORM.BLOCKED:
        acc, right = scaled_sums(
            pipeline, place, step, scale_a, scale_b=scale_b, extents=extents, HALF=HALF, FORM=FORM, TILING=TILING
        )
        if TILING.PARTS == 2 and not FORM.GATED:
            acc = side_by_side(acc, right)
    else:
        zeros = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator(COLUMNS, pipeline.tiles_a.dtype))
        acc = sums(pipeline, step, extents.K, zeros, HALF=HALF, TILING=TILING)
        if scale_a.ptr is not None:
            acc *= factors_of_rows(scale_a, place, acc, block=0, HALF=HALF)
        if FORM.GATED:
            acc, right = by_halves(acc)
        if scale_b.ptr is not None:
            acc *= factors_of_columns(scale_b, place, acc, extents.N, offset=0)
            if FORM.GATED:
                right *= factors_of_columns(scale_b, place, right, extents.N, offset=extents.N)
    if FORM.GATED:
        acc = acc / (1 + gl.exp(-acc)) * right
    return acc


@gluon_jit
def multiply(pipeline, tiles, scale_a, scale_b, extents, HALF: gl.constexpr, FORM: gl.constexpr, TILING: gl.constexpr):
    """A multiplier: one half of each of this program's tiles, if there are rows in it."""
    S: gl.constexpr = TILING.STAGES
    ROWS: gl.constexpr = pipeline.products.shape[2]
    gl.static_assert(gl.num_warps() == 4, "a multiplier is a warp group")
    steps = gl.cdiv(extents.K, pipeline.tiles_a.shape[2])
    number, step, done, total = tiles.first(), 0, 0, tiles.count()
    while number < total:
        place = tiles.at(number)
        if place[3] + HALF * ROWS < place[2]:
            acc = results(
                pipeline, place, step, scale_a, scale_b=scale_b, extents=extents, HALF=HALF, FORM=FORM, TILING=TILING
            )
            mbarrier.wait(pipeline.epilogue_empty.index(0), done & 1 ^ 1)
            leave_all(pipeline, acc.to(pipeline.products.dtype), HALF)
        else:
            # Nothing to do, in step with the others: each phase of a stage has an arrival of both multipliers.
            for stage in range(step, step + steps):
                mbarrier.wait(pipeline.smem_full.index(stage % S), stage // S & 1)
                mbarrier.arrive(pipeline.smem_empty.index(stage % S), count=1)
            mbarrier.wait(pipeline.epilogue_empty.index(0), done & 1 ^ 1)
        mbarrier.arrive(pipeline.epilogue_full.index(0), count=1)
        step += steps
        done += 1
        number = tiles.after(number, total)
