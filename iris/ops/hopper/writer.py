"""The writer's part of a tile: from the products in shared memory to where they belong.

It goes by panels, in which the multipliers leave them (`iris.ops.hopper.pipeline`), and by strips of these.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from iris.language.address import bytes_of
from iris.language.barrier import LANES, lanes
from iris.language.fences import await_bulk_stores, block_barrier
from iris.language.jit import gluon_jit
from iris.ops.hopper.pace import await_turn
from iris.ops.hopper.pipeline import PANEL

# Triton 3.6's name is another than 3.9's.
put = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

# Rows of a strip: what is sent at a time, and what the writer has in registers at a time, 32 elements a thread.
STRIP = gl.constexpr(32)
STRIP_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0]))


@gluon_jit
def await_products(pipeline, tile):
    """The writer, before it reads the products of its tile number ``tile``."""
    mbarrier.wait(pipeline.epilogue_full.index(0), tile & 1)


@gluon_jit
def strips_of(pipeline):
    """How many strips a tile has."""
    return pipeline.products.shape[0] * (pipeline.products.shape[2] // STRIP)


@gluon_jit
def strip_of(pipeline, panel, strip: gl.constexpr):
    """The shared memory of `STRIP` rows of a panel."""
    ROWS: gl.constexpr = pipeline.products.shape[2]
    return pipeline.products.index(panel).reshape([ROWS, PANEL]).slice(strip * STRIP, STRIP)


@gluon_jit
def first_row_of(pipeline, panel, strip: gl.constexpr):
    """Which row of the tile the strip's first is."""
    ROWS: gl.constexpr = pipeline.products.shape[2]
    return panel // (pipeline.products.shape[0] // 2) * ROWS + strip * STRIP


@gluon_jit
def rows_of(pipeline, panel, strip: gl.constexpr):
    """Which rows of the tile the strip's are."""
    return first_row_of(pipeline, panel, strip) + gl.arange(0, STRIP, gl.SliceLayout(1, STRIP_LAYOUT))


@gluon_jit
def columns_of(pipeline, panel):
    """Which columns of the tile the panel's are."""
    first = panel % (pipeline.products.shape[0] // 2) * PANEL
    return first + gl.arange(0, PANEL, gl.SliceLayout(0, STRIP_LAYOUT))


@gluon_jit
def with_bias(values, bias, columns, N):
    """``values`` plus the bias of their columns, in their type: they have been rounded once, and are again."""
    added = gl.load(bias + columns, mask=columns < N, other=0).to(gl.float32)
    return (values.to(gl.float32) + added[None, :]).to(values.dtype)


@gluon_jit
def add_bias(pipeline, bias, column, N):
    """Add the bias to the products where they are, in shared memory, for TMA to send them."""
    for panel in range(pipeline.products.shape[0]):
        columns = column + columns_of(pipeline, panel)
        for strip in gl.static_range(pipeline.products.shape[2] // STRIP):
            memory = strip_of(pipeline, panel, strip)
            memory.store(with_bias(memory.load(STRIP_LAYOUT), bias, columns, N))
    show_to_tma()


@gluon_jit
def store_products(pipeline, bias, out, row, column, rows, N):
    """The products, plus bias, to rows and columns of ``out`` from these on, below ``rows`` and ``N``."""
    for panel in range(pipeline.products.shape[0]):
        columns = column + columns_of(pipeline, panel)
        at_n = columns.to(gl.int64)[None, :] * out.column_stride
        for strip in gl.static_range(pipeline.products.shape[2] // STRIP):
            lines = row + rows_of(pipeline, panel, strip)
            values = strip_of(pipeline, panel, strip).load(STRIP_LAYOUT)
            if bias is not None:
                values = with_bias(values, bias, columns, N)
            mask = (lines < rows)[:, None] & (columns < N)[None, :]
            gl.store(out.ptr + (lines.to(gl.int64)[:, None] * out.row_stride + at_n), values, mask=mask)


@gluon_jit
def show_to_tma():
    """The writer, between its stores to the products and TMA's loads of them: each thread's fence, then the barrier."""
    fence_async_shared()
    block_barrier()


@gluon_jit
def put_strip(pipeline, peers, place, row, column, panel, strip: gl.constexpr):
    """Begin to copy a strip of the products to where it belongs in the slice ``place`` of ``peers``."""
    PANELS: gl.constexpr = pipeline.products.shape[0] // 2
    HALF: gl.constexpr = pipeline.products.shape[2]
    memory = pipeline.products.index(panel).slice(strip * STRIP, STRIP, 1)
    put(peers, [place, row + panel // PANELS * HALF + strip * STRIP, column + panel % PANELS * PANEL], memory)


@gluon_jit
def bytes_within(pipeline, row, column, rows, N):
    """How many bytes of the tile at this row and column are of rows below ``rows`` and columns below ``N``."""
    PANELS: gl.constexpr = pipeline.products.shape[0] // 2
    HALF: gl.constexpr = pipeline.products.shape[2]
    there = gl.maximum(gl.minimum(rows - row, 2 * HALF), 0) * gl.minimum(N - column, PANELS * PANEL)
    return there * bytes_of(pipeline.products.dtype)


@gluon_jit
def send_products(pipeline, tracing, peers, place, like, rank, row, column, rows, N):
    """Copy the products to rows and columns from these on, below ``rows`` and ``N``, of ``rank``.

    ``peers``: a rank's rows and columns are the slice ``place`` of it. ``like``: a pointer into memory of the same
    group, for traces. A strip at a time: more of them on their way than the link takes at once would stand in the way
    of what the loader fetches (docs/performance-lessons.md, "Sending beside a product"). On return all are in the
    rank's memory, so that a signal tells of them.
    """
    event = tracing.begin_bulk("put", like, rank, bytes_within(pipeline, row=row, column=column, rows=rows, N=N))
    for panel in range(pipeline.products.shape[0]):
        for strip in gl.static_range(pipeline.products.shape[2] // STRIP):
            put_strip(pipeline, peers, place, row=row, column=column, panel=panel, strip=strip)
            await_bulk_stores()
    tracing.record_event_end(event)


@gluon_jit
def keep_products(pipeline, peers, place, row, column):
    """The same to this rank's own memory, all strips at a time: that is near. In place on return."""
    for panel in range(pipeline.products.shape[0]):
        for strip in gl.static_range(pipeline.products.shape[2] // STRIP):
            put_strip(pipeline, peers, place, row=row, column=column, panel=panel, strip=strip)
    await_bulk_stores()


@gluon_jit
def send_products_to_all(pipeline, pace, ctx, peers, places, like, row, column, rows, N):
    """The same to every rank, at its slice of ``places``, each strip when its turn comes (`iris.ops.hopper.pace`).

    A strip goes to all peers at once, so that no two ranks are likely to send to the same one. On return what peers get
    is in their memory; what stays here may still be on its way, until `await_bulk_stores`.
    """
    W: gl.constexpr = ctx.num_ranks
    TURNS: gl.constexpr = pipeline.products.shape[2] // STRIP
    moved = bytes_within(pipeline, row=row, column=column, rows=rows, N=N)
    for first in gl.static_range(1, W, LANES):
        distances = first + lanes()
        event = ctx.tracing.begin_bulk(
            "put", like, rank=(ctx.cur_rank + distances) % W, moved=moved, asked=distances < W
        )
        for panel in range(pipeline.products.shape[0]):
            for strip in gl.static_range(TURNS):
                await_turn(pace, panel * TURNS + strip)
                for distance in gl.static_range(first, min(first + LANES, W)):
                    place = gl.load(places + (ctx.cur_rank + distance) % W)
                    put_strip(pipeline, peers, place, row=row, column=column, panel=panel, strip=strip)
                await_bulk_stores()
        ctx.tracing.record_event_end(event)
    place = gl.load(places + ctx.cur_rank)
    for panel in range(pipeline.products.shape[0]):
        for strip in gl.static_range(TURNS):
            put_strip(pipeline, peers, place, row=row, column=column, panel=panel, strip=strip)


@gluon_jit
def free_products(pipeline):
    """Let the multipliers write the next products: the writer has read these, and its copies by TMA have."""
    tma.store_wait(0)
    block_barrier()
    mbarrier.arrive(pipeline.epilogue_empty.index(0), count=1)
