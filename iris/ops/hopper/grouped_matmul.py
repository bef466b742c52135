"""out[r] = A[r] B[g], for the rows r of each group g: grouped GEMM by warps with roles.

The roles are those of `iris.ops.hopper.pipeline`: a loader (TMA), two multipliers (wgmma), a writer. A and B are one
matrix each to TMA: groups of A lie one after the other, and so do the matrices of B, whose tile begins where its
group's does. What a tile fetches past its group's rows or columns is thrown away: products of a row or column depend
on no other one.

Two limits, as in `iris.ops.grouped.matmul`: operations, and the bytes of the weights. A tile has 128 rows, which is
enough to be bound by the weights' bytes alone where a group has few rows: 128 operations a byte of bf16 where H200 has
206, 256 of fp8 where it has 412. So tiles need no other height for decoding. But where a group's last tile has 64 rows
or fewer, its lower half is neither fetched nor multiplied, and costs nothing: of a group of 300 rows 320 are computed,
and not 384.

How a tile is found is in `iris.ops.grouped.groups`. Here, all roles read the groups from shared memory, where the
program has left them once.

Another kernel may run beside the end of this one, and use what is finished (`iris.ops.grouped.stages`). It is the next
on the stream, and may begin when all programs of this one have: so it never takes a place that one of these waits for.
It finds room when the last LEAVING programs end, before the others, which share what is left. The writer counts a tile
when its results are stored: a release after its barrier.
"""

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from iris.language.dependent_launch import gdc_launch_dependents, gdc_wait
from iris.language.fences import block_barrier
from iris.language.jit import gluon_jit
from iris.language.jit import triton_aggregate as aggregate
from iris.language.ordering import signal
from iris.ops.gemm import swizzle_tile
from iris.ops.grouped.groups import rows_of
from iris.ops.grouped.stages import stage_of
from iris.ops.hopper.grouped_product import multiply
from iris.ops.hopper.pipeline import PANEL, REGISTERS, WARPS, barriers, fetch
from iris.ops.hopper.writer import (
    STRIP,
    STRIP_LAYOUT,
    await_products,
    columns_of,
    first_row_of,
    free_products,
    strip_of,
)
from iris.ops.hopper.writer import rows_of as rows_in_tile

# As `REGISTERS`, where a multiplier has 64 x 256 sums and 64 x 128 products: 192 registers a thread.
REGISTERS_OF_PARTS = gl.constexpr([216, 72, 72])


@gluon_jit
def _sum(a, b):
    return a + b


@triton.constexpr_function
def for_each_warp(groups, warps):
    """A layout of a vector of groups of which every warp has all."""
    return gl.SliceLayout(0, gl.BlockedLayout([1, groups // 32], [1, 32], [warps, 1], [1, 0]))


@aggregate
class Tiles:
    """The tiles of all groups, by number. In shared memory, of each group: the tile after its last, its first row,
    and how many rows it has."""

    ends: gl.shared_memory_descriptor
    firsts: gl.shared_memory_descriptor
    counts: gl.shared_memory_descriptor
    columns: gl.tensor
    BLOCK_M: gl.constexpr
    COLUMNS: gl.constexpr
    GROUP: gl.constexpr
    LEAVING: gl.constexpr

    @triton.constexpr_function
    def __init__(self, ends, firsts, counts, columns, BLOCK_M, COLUMNS, GROUP, LEAVING):
        self.ends = ends
        self.firsts = firsts
        self.counts = counts
        self.columns = columns
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.COLUMNS = gl.constexpr(COLUMNS)
        self.GROUP = gl.constexpr(GROUP)
        self.LEAVING = gl.constexpr(LEAVING)

    @gluon_jit
    def count(self):
        return gl.max(self.ends.load(for_each_warp(self.ends.shape[0], gl.num_warps())), axis=0)

    @gluon_jit
    def of_all(self, total):
        """How many tiles, the first ones, all programs share: five eighths, in whole rounds."""
        return total * 5 // 8 // gl.num_programs(0) * gl.num_programs(0)

    @gluon_jit
    def first(self):
        """This program's first tile; as many as there are, if it has none."""
        number = gl.program_id(0)
        if self.LEAVING > 0:
            total = self.count()
            has_one = number < gl.maximum(self.of_all(total), gl.num_programs(0) - self.LEAVING)
            number = gl.where(has_one, number, total)
        return number

    @gluon_jit
    def after(self, number, total):
        """This program's next tile, or one of ``total`` or more."""
        following = number + gl.num_programs(0)
        if self.LEAVING > 0:
            of_all, staying = self.of_all(total), gl.num_programs(0) - self.LEAVING
            shared = gl.where(number < of_all, of_all + gl.program_id(0), number + staying)
            shared = gl.where(gl.program_id(0) < staying, shared, total)
            following = gl.where(following < of_all, following, shared)
        return following

    @gluon_jit
    def at(self, number):
        """The group of a tile, that group's first row and how many it has, and the tile's first row and column there.

        No warp waits for another: each has the whole vectors.
        """
        layout: gl.constexpr = for_each_warp(self.ends.shape[0], gl.num_warps())
        ends = self.ends.load(layout)
        before = ends <= number
        group = gl.sum(before.to(gl.int32), axis=0)
        begin = gl.max(gl.where(before, ends, 0), axis=0)
        this = gl.arange(0, self.ends.shape[0], layout) == group
        first = gl.sum(gl.where(this, self.firsts.load(layout), 0), axis=0)
        count = gl.sum(gl.where(this, self.counts.load(layout), 0), axis=0)
        tiles_m, tiles_n = gl.cdiv(count, self.BLOCK_M), gl.cdiv(self.columns, self.COLUMNS)
        pid_m, pid_n = swizzle_tile(number - begin, tiles_m, tiles_n, self.GROUP)
        return group, first, count, pid_m * self.BLOCK_M, pid_n * self.COLUMNS


@gluon_jit
def find_tiles(groups, E, room, columns, FORM: gl.constexpr, TILING: gl.constexpr):
    """By all warps of the program, before they part."""
    GROUPS: gl.constexpr = FORM.GROUPS
    COLUMNS: gl.constexpr = TILING.BLOCK_N // 2 if FORM.GATED else TILING.BLOCK_N
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    firsts, heights = rows_of(groups, gl.arange(0, GROUPS, layout), E, room)
    tiles = gl.cdiv(heights, TILING.BLOCK_M) * gl.cdiv(columns, COLUMNS)
    ends = gl.associative_scan(tiles, 0, _sum)
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    found = Tiles(
        ends=gl.allocate_shared_memory(gl.int32, [GROUPS], shared),
        firsts=gl.allocate_shared_memory(gl.int32, [GROUPS], shared),
        counts=gl.allocate_shared_memory(gl.int32, [GROUPS], shared),
        columns=columns,
        BLOCK_M=TILING.BLOCK_M,
        COLUMNS=COLUMNS,
        GROUP=TILING.GROUP,
        LEAVING=TILING.LEAVING,
    )
    found.ends.store(ends)
    found.firsts.store(firsts)
    found.counts.store(heights)
    block_barrier()
    return found


@aggregate
class GroupedPipeline:
    """A program's shared memory, and who hands it on: as `iris.ops.hopper.pipeline.Pipeline`."""

    tiles_a: gl.shared_memory_descriptor
    tiles_b: gl.shared_memory_descriptor
    products: gl.shared_memory_descriptor
    smem_full: gl.shared_memory_descriptor
    smem_empty: gl.shared_memory_descriptor
    epilogue_full: gl.shared_memory_descriptor
    epilogue_empty: gl.shared_memory_descriptor

    @triton.constexpr_function
    def __init__(self, tiles_a, tiles_b, products, smem_full, smem_empty, epilogue_full, epilogue_empty):
        self.tiles_a = tiles_a
        self.tiles_b = tiles_b
        self.products = products
        self.smem_full = smem_full
        self.smem_empty = smem_empty
        self.epilogue_full = epilogue_full
        self.epilogue_empty = epilogue_empty


@gluon_jit
def make_pipeline(a, b, element: gl.constexpr, FORM: gl.constexpr, TILING: gl.constexpr):
    """For tiles of A and B of these tensor maps, of B with a gate by halves, and products of type ``element``."""
    HALF: gl.constexpr = a.block_type.shape[0]
    BLOCK_K: gl.constexpr = a.block_type.shape[1]
    BLOCK_N: gl.constexpr = TILING.BLOCK_N
    STAGES: gl.constexpr = TILING.STAGES
    PANELS: gl.constexpr = BLOCK_N // 2 // PANEL if FORM.GATED else BLOCK_N // PANEL
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, HALF, PANEL], element)
    PARTS: gl.constexpr = TILING.PARTS
    shape_b: gl.constexpr = [BLOCK_N // PARTS, BLOCK_K] if TILING.TRANS_B else [BLOCK_K, BLOCK_N]
    made = GroupedPipeline(
        tiles_a=gl.allocate_shared_memory(a.dtype, [2 * STAGES, HALF, BLOCK_K], a.layout),
        tiles_b=gl.allocate_shared_memory(b.dtype, [PARTS * STAGES, shape_b[0], shape_b[1]], b.layout),
        products=gl.allocate_shared_memory(element, [2 * PANELS, 1, HALF, PANEL], layout),
        smem_full=barriers(STAGES, 1),
        smem_empty=barriers(STAGES, 2),
        epilogue_full=barriers(1, 2),
        epilogue_empty=barriers(1, 1),
    )
    # TMA, which completes barriers, must find them initialised.
    fence_async_shared()
    return made


@gluon_jit
def load(pipeline, tiles, a, b, extents, FORM: gl.constexpr, TILING: gl.constexpr):
    """The loader's part."""
    S: gl.constexpr = TILING.STAGES
    HALF: gl.constexpr = a.block_type.shape[0]
    BLOCK_K: gl.constexpr = a.block_type.shape[1]
    BLOCK_N: gl.constexpr = TILING.BLOCK_N
    PARTS: gl.constexpr = TILING.PARTS
    BYTES_B: gl.constexpr = b.block_type.nbytes * (2 if FORM.GATED else PARTS)
    number, step, total = tiles.first(), 0, tiles.count()
    while number < total:
        group, first, count, row, column = tiles.at(number)
        both, alone = row + HALF < count, row + HALF >= count
        row += group * extents.pitch_a + first
        offset = group * extents.pitch_b
        for k in range(0, extents.K, BLOCK_K):
            stage = step % S
            mbarrier.wait(pipeline.smem_empty.index(stage), step // S & 1 ^ 1)
            full, tile = pipeline.smem_full.index(stage), pipeline.tiles_b.index(PARTS * stage)
            # One arrival, by either.
            mbarrier.expect(full, 2 * a.block_type.nbytes + BYTES_B, pred=both)
            mbarrier.expect(full, a.block_type.nbytes + BYTES_B, pred=alone)
            fetch(a, [row, k], full, pipeline.tiles_a.index(2 * stage))
            fetch(a, [row + HALF, k], full, pipeline.tiles_a.index(2 * stage + 1), pred=both)
            if PARTS == 2:
                second = extents.N if FORM.GATED else BLOCK_N // 2
                fetch(b, [offset + column, k], full, tile)
                fetch(b, [offset + second + column, k], full, pipeline.tiles_b.index(PARTS * stage + 1))
            elif FORM.GATED:
                gl.static_assert(TILING.TRANS_B, "a B with a gate lies by columns")
                fetch(b, [offset + column, k], full, tile.slice(0, BLOCK_N // 2))
                fetch(b, [offset + extents.N + column, k], full, tile.slice(BLOCK_N // 2, BLOCK_N // 2))
            elif TILING.TRANS_B:
                fetch(b, [offset + column, k], full, tile)
            else:
                fetch(b, [offset + k, column], full, tile)
            step += 1
        number = tiles.after(number, total)


@gluon_jit
def write(pipeline, tiles, out, progress, STAGES: gl.constexpr, TILING: gl.constexpr):
    """The writer's part: rows of the tile's group alone, strips without any not at all."""
    number, done, total = tiles.first(), 0, tiles.count()
    while number < total:
        group, first, count, row, column = tiles.at(number)
        await_products(pipeline, done)
        begin = out.ptr + group.to(gl.int64) * out.group_stride + first.to(gl.int64) * out.row_stride
        for panel in range(pipeline.products.shape[0]):
            columns = column + columns_of(pipeline, panel)
            at_n = columns.to(gl.int64)[None, :] * out.column_stride
            for strip in gl.static_range(pipeline.products.shape[2] // STRIP):
                lines = row + rows_in_tile(pipeline, panel, strip)
                # The same, but a minimum of all threads' rows takes registers, which the writer of two parts lacks.
                top = row + first_row_of(pipeline, panel, strip) if TILING.PARTS == 2 else gl.min(lines, axis=0)
                if top < count:
                    values = strip_of(pipeline, panel, strip).load(STRIP_LAYOUT)
                    mask = (lines < count)[:, None] & (columns < tiles.columns)[None, :]
                    gl.store(begin + (lines.to(gl.int64)[:, None] * out.row_stride + at_n), values, mask=mask)
        free_products(pipeline)
        if progress is not None:
            signal(progress.finished + stage_of(group, STAGES), 1, "add", "gpu")
        done += 1
        number = tiles.after(number, total)


# A number of rows or groups may be 1, and is no constant then.
@gluon_jit(do_not_specialize=["room", "E"])
def hopper_grouped_matmul(
    tensor_map_a,
    tensor_map_b,
    scale_a,
    scale_b,
    groups,
    out,
    progress,
    room,
    E,
    extents,
    FORM: gl.constexpr,
    TILING: gl.constexpr,
    STAGES: gl.constexpr,
):
    """``tensor_map_a``: all rows; the groups' matrices lie ``extents.pitch_a`` rows apart, or 0 of a compact A.
    ``tensor_map_b``: the columns of all groups, ``extents.pitch_b`` apart, each along K; or without ``TRANS_B`` the
    rows of all groups. ``progress``: a `Progress`, with its `Stages`, or None. Everything else is as in
    `iris.ops.grouped.matmul.grouped_matmul`.
    """
    gdc_wait()
    if progress is not None:
        if gl.program_id(0) == 0:
            signal(progress.begun, 1, "set", "gpu")
        gdc_launch_dependents()
    tiles = find_tiles(groups, E, room, columns=extents.N, FORM=FORM, TILING=TILING)
    element: gl.constexpr = out.ptr.dtype.element_ty
    pipeline = make_pipeline(tensor_map_a, tensor_map_b, element, FORM=FORM, TILING=TILING)
    gl.warp_specialize(
        [
            (multiply, (pipeline, tiles, scale_a, scale_b, extents, 0, FORM, TILING)),
            (multiply, (pipeline, tiles, scale_a, scale_b, extents, 1, FORM, TILING)),
            (write, (pipeline, tiles, out, progress, STAGES, TILING)),
            (load, (pipeline, tiles, tensor_map_a, tensor_map_b, extents, FORM, TILING)),
        ],
        WARPS,
        REGISTERS_OF_PARTS if TILING.PARTS == 2 else REGISTERS,
    )
