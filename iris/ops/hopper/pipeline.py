"""The product of matrices by warps with roles, which the kernels of this folder share.

A program is twelve warps in four partitions, and computes one tile of BLOCK_M x BLOCK_N after the other:

* the **loader**, one warp, fetches tiles of A and B by TMA into a ring of ``stages``;
* two **multipliers**, a warp group each, multiply the upper and the lower half of a tile's rows (wgmma), scale and
  round the products and leave them in shared memory;
* the **writer**, two warps, takes them from there to where they belong: to peers, by TMA, or into the result.

So while the writer stores over the link the multipliers are at the next tile, and the loader ahead of both. All
partitions walk the same tiles in the same order: those that the loader has taken (`iris.ops.hopper.tile_scheduler`).

Four kinds of mbarrier (PTX ISA, "mbarrier") hand the memory on; phases alternate, from 0 on:

* ``smem_full[s]``: the bytes of stage s are there. Completed by TMA, awaited by both multipliers.
* ``smem_empty[s]``: both multipliers have read stage s. A product is over when the group has waited for it, and only
  then does it arrive. Awaited by the loader; the ring is empty at first, which is as if phase 1 had been completed.
* ``epilogue_full``: both halves of the products are in shared memory, for loads and for TMA, and their time with them:
  each group's stores and its fence come before its barrier, and that before the arrival. Awaited by the writer.
* ``epilogue_empty``: the writer has read the products: its loads have their values at its barrier, and its copies by
  TMA have been waited for. Awaited by the multipliers.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from iris.language.address import bytes_of
from iris.language.clock import cycles
from iris.language.fences import block_barrier
from iris.language.jit import gluon_jit
from iris.language.jit import triton_aggregate as aggregate
from iris.language.tracing import TraceEvent
from iris.ops.gemm import by_halves
from iris.ops.hopper.pace import leave_time
from iris.ops.hopper.split_k import add_up, hand_over, part_of_depth
from iris.ops.hopper.tile_scheduler import READERS, SLOTS, await_next

# Triton 3.6's names are other than 3.9's.
fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

# Of the second multiplier, the writer and the loader: warps, and registers a thread. A warp group has one number of
# registers, and the last two share one. The first multiplier has what is left of 3 x 168.
WARPS = gl.constexpr([4, 2, 1])
REGISTERS = gl.constexpr([184, 136, 136])
# Columns of a panel of the products: 128 bytes, which TMA and the layout of shared memory keep together.
PANEL = gl.constexpr(64)


@gluon.constexpr_function
def accumulator(columns, element):
    """The layout of a warp group's products: m64nNk16, or k32 of fp8, which are 32 bytes."""
    depth = 256 // element.primitive_bitwidth
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, depth])


@gluon_jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@aggregate
class Pipeline:
    """A program's shared memory.

    Tiles of A lie by halves, of stage s in ``tiles_a[2 s]`` and ``tiles_a[2 s + 1]``. The products lie by panels of
    half a tile's rows and `PANEL` columns, the upper half's first, each in the shape in which TMA takes it to a rank:
    ``[panels, 1, rows, PANEL]``. ``took[0]``: cycles of their product, where stores are paced. ``numbers``: a ring, of
    the units that come next (`iris.ops.hopper.tile_scheduler`), which
    programs use if they take units ``BY_TICKETS``.
    """

    tiles_a: gl.shared_memory_descriptor
    tiles_b: gl.shared_memory_descriptor
    products: gl.shared_memory_descriptor
    took: gl.shared_memory_descriptor
    smem_full: gl.shared_memory_descriptor
    smem_empty: gl.shared_memory_descriptor
    epilogue_full: gl.shared_memory_descriptor
    epilogue_empty: gl.shared_memory_descriptor
    numbers: gl.shared_memory_descriptor
    work_full: gl.shared_memory_descriptor
    work_empty: gl.shared_memory_descriptor
    BY_TICKETS: gl.constexpr

    @triton.constexpr_function
    def __init__(
        self,
        tiles_a,
        tiles_b,
        products,
        took,
        smem_full,
        smem_empty,
        epilogue_full,
        epilogue_empty,
        numbers,
        work_full,
        work_empty,
        BY_TICKETS,
    ):
        self.tiles_a = tiles_a
        self.tiles_b = tiles_b
        self.products = products
        self.took = took
        self.smem_full = smem_full
        self.smem_empty = smem_empty
        self.epilogue_full = epilogue_full
        self.epilogue_empty = epilogue_empty
        self.numbers = numbers
        self.work_full = work_full
        self.work_empty = work_empty
        self.BY_TICKETS = gl.constexpr(BY_TICKETS)


@gluon_jit
def make_pipeline(a, b, element: gl.constexpr, TILING: gl.constexpr, BY_TICKETS: gl.constexpr = True):
    """For tiles that the descriptors ``a`` and ``b`` fetch, and products of type ``element``.

    ``BY_TICKETS``: whether units are taken by tickets, and so go through the ring of numbers.
    """
    BLOCK_M: gl.constexpr = TILING.BLOCK_M
    BLOCK_N: gl.constexpr = TILING.BLOCK_N
    STAGES: gl.constexpr = TILING.STAGES
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, BLOCK_M // 2, PANEL], element)
    tiles_a = gl.allocate_shared_memory(a.dtype, [2 * STAGES, a.block_type.shape[0], a.block_type.shape[1]], a.layout)
    tiles_b = gl.allocate_shared_memory(b.dtype, [STAGES, b.block_type.shape[0], b.block_type.shape[1]], b.layout)
    products = gl.allocate_shared_memory(element, [2 * BLOCK_N // PANEL, 1, BLOCK_M // 2, PANEL], layout)
    took = gl.allocate_shared_memory(gl.int64, [1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    smem_full, smem_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    epilogue_full, epilogue_empty = barriers(1, 2), barriers(1, 1)
    numbers = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    # A barrier that nobody uses must not be made. Triton gives its memory to others, and the GPU, which has not been
    # told that the barrier is gone (PTX ISA, "mbarrier.inval"), may write its state there: seen on H100 where several
    # processes took turns. Without tickets nothing waits for the ring of numbers: any other barriers do for its fields.
    work_full, work_empty = epilogue_full, epilogue_empty
    if BY_TICKETS:
        work_full, work_empty = barriers(SLOTS, 1), barriers(SLOTS, READERS)
    made = Pipeline(
        tiles_a=tiles_a,
        tiles_b=tiles_b,
        products=products,
        took=took,
        smem_full=smem_full,
        smem_empty=smem_empty,
        epilogue_full=epilogue_full,
        epilogue_empty=epilogue_empty,
        numbers=numbers,
        work_full=work_full,
        work_empty=work_empty,
        BY_TICKETS=BY_TICKETS,
    )
    # TMA, which completes barriers, must find them initialised.
    fence_async_shared()
    return made


@gluon_jit
def load_tile(pipeline, a, b, row, column, K, split, splits, step, TRANS_A: gl.constexpr, TRANS_B: gl.constexpr):
    """Fetch the rows of A from ``row`` on, and the columns of B from ``column`` on, in a part of K.

    ``step``: tiles of A and B that have been fetched so far; the new number is returned.

    What lies by columns is described as its transpose. Past the edges of the matrices are zeros.
    """
    S: gl.constexpr = pipeline.tiles_b.shape[0]
    HALF: gl.constexpr = pipeline.products.shape[2]
    BLOCK_K: gl.constexpr = a.block_type.shape[0 if TRANS_A else 1]
    begin, end = part_of_depth(split, splits, K, BLOCK_K)
    for k in range(begin, end, BLOCK_K):
        stage = step % S
        mbarrier.wait(pipeline.smem_empty.index(stage), step // S & 1 ^ 1)
        full = pipeline.smem_full.index(stage)
        mbarrier.expect(full, 2 * a.block_type.nbytes + b.block_type.nbytes)
        for half in gl.static_range(2):
            tile = pipeline.tiles_a.index(2 * stage + half)
            if TRANS_A:
                fetch(a, [k, row + half * HALF], full, tile)
            else:
                fetch(a, [row + half * HALF, k], full, tile)
        if TRANS_B:
            fetch(b, [column, k], full, pipeline.tiles_b.index(stage))
        else:
            fetch(b, [k, column], full, pipeline.tiles_b.index(stage))
        step += 1
    return step


@gluon_jit
def leave(pipeline, panel: gl.constexpr, values):
    pipeline.products.index(panel).reshape([values.shape[0], PANEL]).store(values)


@gluon_jit
def leave_all(pipeline, products, HALF: gl.constexpr):
    """A multiplier's products, by panels, for loads and for TMA."""
    PANELS: gl.constexpr = pipeline.products.shape[0] // 2
    if PANELS == 1:
        leave(pipeline, HALF, products)
    elif PANELS == 2:
        left, right = by_halves(products)
        leave(pipeline, 2 * HALF, left)
        leave(pipeline, 2 * HALF + 1, right)
    else:
        gl.static_assert(PANELS == 4, "a tile has 64, 128 or 256 columns")
        left, right = by_halves(products)
        first, second = by_halves(left)
        third, fourth = by_halves(right)
        leave(pipeline, 4 * HALF, first)
        leave(pipeline, 4 * HALF + 1, second)
        leave(pipeline, 4 * HALF + 2, third)
        leave(pipeline, 4 * HALF + 3, fourth)
    fence_async_shared()
    block_barrier()


@gluon_jit
def factors(scale, first, stop, like, AXIS: gl.constexpr):
    """Those of rows or, along axis 1, columns from ``first`` on, below ``stop``, of products that lie as ``like``."""
    i = first + gl.arange(0, like.shape[AXIS], gl.SliceLayout(1 - AXIS, like.type.layout))
    return gl.expand_dims(gl.load(scale + i, mask=i < stop, other=0), 1 - AXIS)


@gluon_jit
def multiply(pipeline, ctx, units, order, epilogue, K, HALF: gl.constexpr, TILING: gl.constexpr):
    """A multiplier: one half of each of this program's units.

    ``order``: where tiles are (`at`), and how many rows and columns there are. ``epilogue``: what these are multiplied
    by, or None; one number, or with ``SCALE_A_PER_ROW`` and ``SCALE_B_PER_COLUMN`` one for each.

    Of fp8 the tensor cores add up with fewer bits than float32 has. So each stage's products begin with zero, and are
    added here, while the other multiplier's are under way.
    """
    TRANS_A: gl.constexpr = TILING.TRANS_A
    TRANS_B: gl.constexpr = TILING.TRANS_B
    PACED: gl.constexpr = TILING.PACED
    SCALE_A_PER_ROW: gl.constexpr = TILING.SCALE_A_PER_ROW
    SCALE_B_PER_COLUMN: gl.constexpr = TILING.SCALE_B_PER_COLUMN
    scale_a, scale_b = epilogue.scale_a, epilogue.scale_b
    S: gl.constexpr = pipeline.tiles_b.shape[0]
    ROWS: gl.constexpr = pipeline.products.shape[2]
    PANELS: gl.constexpr = pipeline.products.shape[0] // 2
    COLUMNS: gl.constexpr = PANELS * PANEL
    BLOCK_K: gl.constexpr = pipeline.tiles_a.shape[1 if TRANS_A else 2]
    ELEMENT: gl.constexpr = pipeline.tiles_a.dtype
    NARROW: gl.constexpr = bytes_of(ELEMENT) == 1
    gl.static_assert(gl.num_warps() == 4, "a multiplier is a warp group")
    if scale_a is not None and not SCALE_A_PER_ROW:
        of_rows = gl.load(scale_a)
    if scale_b is not None and not SCALE_B_PER_COLUMN:
        of_columns = gl.load(scale_b)
    number, nth, step, done = gl.program_id(0), 0, 0, 0
    while number < units.count():
        tile, split, splits = units.at(number)
        begin, end = part_of_depth(split, splits, K, BLOCK_K)
        since = cycles() if PACED else 0
        work = ctx.tracing.record_event_start(TraceEvent.compute, pid_m=HALF, pid_n=tile)
        zeros = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator(COLUMNS, ELEMENT))
        acc = zeros
        # Here, where the products hide some of the time that factors take to come.
        if SCALE_A_PER_ROW or SCALE_B_PER_COLUMN:
            row, column = order.at(tile)
        if SCALE_A_PER_ROW:
            of_rows = factors(scale_a, first=row + HALF * ROWS, stop=order.rows, like=zeros, AXIS=0)
        if SCALE_B_PER_COLUMN:
            of_columns = factors(scale_b, first=column, stop=order.columns, like=zeros, AXIS=1)
        for k in range(begin, end, BLOCK_K):
            stage = step % S
            mbarrier.wait(pipeline.smem_full.index(stage), step // S & 1)
            left, right = pipeline.tiles_a.index(2 * stage + HALF), pipeline.tiles_b.index(stage)
            if TRANS_A:
                left = left.permute((1, 0))
            if TRANS_B:
                right = right.permute((1, 0))
            if NARROW:
                product = warpgroup_mma(left, right, zeros, is_async=True)
                product = warpgroup_mma_wait(0, deps=[product])
                mbarrier.arrive(pipeline.smem_empty.index(stage), count=1)
                acc += product
            else:
                product = warpgroup_mma(left, right, acc, is_async=True)
                # One product is always under way. The one before it is over, and so its stage can be filled again.
                acc = warpgroup_mma_wait(1, deps=[product])
                mbarrier.arrive(pipeline.smem_empty.index((step + S - 1) % S), count=1, pred=k > begin)
            step += 1
        if not NARROW:
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(pipeline.smem_empty.index((step + S - 1) % S), count=1)
        ctx.tracing.record_event_end(work)
        took = cycles() - since if PACED else 0
        if units.SPLIT:
            if split < splits - 1:
                hand_over(units, tile, split, acc, HALF=HALF)
            elif splits > 1:
                acc = add_up(units, ctx, tile, acc, HALF=HALF)
        if split == splits - 1:
            mbarrier.wait(pipeline.epilogue_empty.index(0), done & 1 ^ 1)
            if PACED and HALF == 0:
                leave_time(pipeline.took, took)
            if scale_a is not None:
                acc *= of_rows
            if scale_b is not None:
                acc *= of_columns
            leave_all(pipeline, acc.to(pipeline.products.dtype), HALF)
            mbarrier.arrive(pipeline.epilogue_full.index(0), count=1)
            done += 1
        number = await_next(pipeline, units, number, nth)
        nth += 1
