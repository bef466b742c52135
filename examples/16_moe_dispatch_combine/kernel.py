"""Tokens to the ranks of their experts and back: three kernels, none of which knows beforehand how many rows come.

`dispatch` counts, tells the peers, and stores each token's row where its experts are, so that the rows of one expert
lie one behind the other. `grouped_gemm` multiplies them, each expert's by its own matrix, and knows nothing of other
ranks. `combine` fetches a token's results from where they are and adds them up.

Over the link, each rank: E counts to every peer in one step; then a row of H elements for each (token, expert) pair
whose expert is elsewhere, in one step there, and one back.
"""

import triton
import triton.language as tl

from iris import DeviceContext, TraceEvent
from iris.language.ordering import store_after_sync  # a store, behind every warp's load of the same word
from iris.ops.gemm import product, swizzle_tile
from iris.ops.kernel_arguments import Matrix, Tiling


# A number of tokens may be 1, and is no constant then.
@triton.jit(do_not_specialize=["T"])
def dispatch(
    context_tensor, x, experts, inbox, order, rows, tallies, tallied, table, counted, epochs, T, H,
    W: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr, TOP: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """``x``: ``[T, H]``. ``experts``: ``[T, TOP]``, those of each token, or -1 where it has none; then it is not sent.
    ``rows``: the same, where in ``inbox`` it is.

    Programs have equal shares of the tokens. ``EXPERTS``: the power of two that E fits in. Symmetric: ``inbox``,
    ``table``, the counts of each rank by expert, ``[W, E]``, and two kinds of flags, which only rise:

    * ``tallied``, to which each program of this rank adds 1 behind its row of ``tallies``, and for all of which each
      waits. The next call's tallies are written when this kernel is over.
    * ``counted[r]``, which rank r sets to its epoch behind its row of ``table``, and for all of which every program of
      every rank waits. It also says that r's stream is past its last call: r has read its inbox, and everybody's
      results. Rank r is past its last call's barrier in front of `combine`, so nobody reads the old table any more.
    """
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    rank, program, programs = ctx.cur_rank, tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs + program) + 1
    expert = tl.arange(0, EXPERTS)
    share = tl.cdiv(T, programs)
    first = tl.minimum(program * share, T)
    last = tl.minimum(first + share, T)

    # Of this program's pairs: how many to each expert, and how many to the same expert are in front of each.
    seen = tl.zeros((EXPERTS,), dtype=tl.int32)
    for begin in range(first * TOP, last * TOP, PAIRS):
        pair = begin + tl.arange(0, PAIRS)
        chosen = tl.load(experts + pair, mask=pair < last * TOP, other=-1)
        one_hot = (chosen[:, None] == expert[None, :]).to(tl.int32)
        so_far = seen[None, :] + tl.cumsum(one_hot, axis=0)
        tl.store(order + pair, tl.sum(one_hot * so_far, axis=1) - 1, mask=pair < last * TOP)
        seen += tl.sum(one_hot, axis=0)
    tl.store(tallies + program * E + expert, seen, mask=expert < E)
    ctx.signal(tallied, 1, rank, op="add")
    ctx.wait(tallied, epoch * programs, cmp="reached")

    # Of this rank's pairs: how many to each expert, and how many of them programs in front of this one have.
    total = tl.zeros((EXPERTS,), dtype=tl.int32)
    before = tl.zeros((EXPERTS,), dtype=tl.int32)
    for begin in range(0, programs, 32):
        p = begin + tl.arange(0, 32)
        mask = (p < programs)[:, None] & (expert < E)[None, :]
        tally = tl.load(tallies + p[:, None] * E + expert[None, :], mask=mask, other=0)
        total += tl.sum(tally, axis=0)
        before += tl.sum(tl.where(p[:, None] < program, tally, 0), axis=0)
    for peer in range(program, W, programs):
        ctx.store(table + rank * E + expert, total, peer, mask=expert < E)
        ctx.signal(counted + rank, epoch, peer)
    for source in range(W):
        ctx.wait(counted + source, epoch, cmp="reached")

    # Of all pairs: an expert's rows begin behind those of earlier experts on its rank, and are in the order of ranks.
    everyones = tl.zeros((EXPERTS,), dtype=tl.int32)
    for source in range(W):
        sent = tl.load(table + source * E + expert, mask=expert < E, other=0)
        everyones += sent
        before += tl.where(source < rank, sent, 0)
    LOCAL: tl.constexpr = E // W
    in_front = (expert[None, :] < expert[:, None]) & (expert[None, :] // LOCAL == expert[:, None] // LOCAL)
    start = before + tl.sum(tl.where(in_front, everyones[None, :], 0), axis=1)

    for begin in range(first, last, BLOCK_T):
        token = begin + tl.arange(0, BLOCK_T)
        here = token < last
        # All loads before all stores, which the compiler cannot know to be of other memory.
        places, to, routed = (), (), ()
        for j in tl.static_range(TOP):
            chosen = tl.load(experts + token * TOP + j, mask=here, other=-1)
            place = tl.load(order + token * TOP + j, mask=here, other=0)
            places += (place + tl.sum(tl.where(chosen[:, None] == expert[None, :], start[None, :], 0), axis=1),)
            to += (ctx.translate(inbox, tl.maximum(chosen, 0) // LOCAL) + places[j].to(tl.int64) * H,)
            routed += ((chosen >= 0)[:, None],)
        for begin_h in range(0, H, BLOCK_H):
            column = begin_h + tl.arange(0, BLOCK_H)[None, :]
            mask = here[:, None] & (column < H)
            data = tl.load(x + token.to(tl.int64)[:, None] * H + column, mask=mask)
            for j in tl.static_range(TOP):
                owner = tl.load(experts + token * TOP + j, mask=here, other=0) // LOCAL
                goes = routed[j] & (column < H)
                sent = ctx.tracing.record_event_start(TraceEvent.put, owner[:, None], inbox + column, mask=goes)
                tl.store(to[j][:, None] + column, data, mask=goes)
                ctx.tracing.record_event_end(sent)
        for j in tl.static_range(TOP):
            tl.store(rows + token * TOP + j, places[j], mask=here)
    # Every warp has read it long before: the waits are barriers of the block.
    store_after_sync(epochs + program, epoch)


@triton.jit
def grouped_gemm(
    inbox, weights, results, counts, stride_counts, H, W: tl.constexpr, LOCAL: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each expert's rows of ``inbox``, ``[rows, H]``, times its matrix of ``weights``, ``[LOCAL, H, H]``.

    ``counts``: ``[W, LOCAL]``, how many rows of each expert came from each rank. A program computes one tile after the
    other. ``EXPERTS``: the power of two that LOCAL fits in.
    """
    expert = tl.arange(0, EXPERTS)
    size = tl.zeros((EXPERTS,), dtype=tl.int32)
    for source in range(W):
        size += tl.load(counts + source * stride_counts + expert, mask=expert < LOCAL, other=0).to(tl.int32)
    tiles_m, tiles_n = (size + BLOCK_M - 1) // BLOCK_M, tl.cdiv(H, BLOCK_N)
    tiles_end = tl.cumsum(tiles_m * tiles_n, axis=0)
    for tile in range(tl.program_id(0), tl.sum(tiles_m * tiles_n, axis=0), tl.num_programs(0)):
        # Whose it is: all tiles of so many experts are in front of it.
        own = tl.sum((tile >= tiles_end).to(tl.int32), axis=0)
        number = tile - tl.sum(tl.where(expert < own, tiles_m * tiles_n, 0), axis=0)
        first = tl.sum(tl.where(expert < own, size, 0), axis=0)
        last = tl.sum(tl.where(expert <= own, size, 0), axis=0)
        pid_m, pid_n = swizzle_tile(number, tl.cdiv(last - first, BLOCK_M), tiles_n, 8)
        rows = first + pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        matrix = weights + own.to(tl.int64) * H * H
        left, right = Matrix(inbox, H, 1), Matrix(matrix, H, 1)
        total = product(left, right, rows, columns, stop_m=last, N=H, K=H, TILING=Tiling(BLOCK_M, BLOCK_N, BLOCK_K))
        mask = (rows < last)[:, None] & (columns < H)[None, :]
        tl.store(results + rows.to(tl.int64)[:, None] * H + columns[None, :], total.to(results.dtype.element_ty), mask)


@triton.jit
def combine(
    context_tensor, results, experts, rows, gates, out, T, H,
    W: tl.constexpr, LOCAL: tl.constexpr, TOP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """``out``, ``[T, H]``: each token's results times its ``gates``, ``[T, TOP]``, added in the order of its choices.

    A program for each block of tokens and columns; they wait for nothing, so there may be any number of them.
    """
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    across = tl.cdiv(H, BLOCK_H)
    token = tl.program_id(0) // across * BLOCK_T + tl.arange(0, BLOCK_T)
    column = (tl.program_id(0) % across * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
    here = token < T
    mask = here[:, None] & (column < H)
    total = tl.zeros((BLOCK_T, BLOCK_H), dtype=tl.float32)
    for j in tl.static_range(TOP):
        chosen = tl.load(experts + token * TOP + j, mask=here, other=-1)
        routed, owner = chosen >= 0, tl.maximum(chosen, 0) // LOCAL
        place = tl.load(rows + token * TOP + j, mask=here, other=0)
        gate = tl.where(routed, tl.load(gates + token * TOP + j, mask=here, other=0), 0)
        result = ctx.translate(results, owner) + place.to(tl.int64) * H
        comes = routed[:, None] & (column < H)
        got = ctx.tracing.record_event_start(TraceEvent.load, owner[:, None], results + column, mask=comes)
        total += gate[:, None] * tl.load(result[:, None] + column, mask=comes, other=0).to(tl.float32)
        ctx.tracing.record_event_end(got)
    tl.store(out + token.to(tl.int64)[:, None] * H + column, total.to(out.dtype.element_ty), mask=mask)
