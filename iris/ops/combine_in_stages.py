"""combine beside the product whose results it adds up: what `iris.experts.combine` does, in the order of stages.

A token's rows on a rank are finished when those of its last expert there are, and the product finishes experts in
their order, by stages (`iris.ops.grouped.stages`). So the work is a list, which is the same on all ranks:

    for each stage, the last one, 0, at the end:
        for each other rank and each block of its tokens: *send*
        for each block of own tokens: *finish* what was sent of the stage before
    *finish* stage 0

Programs take items of this list by tickets, in its order, for as long as there are some. When the product begins to
leave room there are few programs, and at its end as many as there may be.

* *Send*: wait until the product has stored all tiles of the stage and of those before it. Of the block's tokens whose
  last expert here is of this stage, add up the rows, and store the sum to ``partials`` of the token's rank. Set the
  item's flag in ``staged`` there, also if there was no such token.
* *Finish*: wait for the product likewise, and for the flags of this block, of this stage and all before it, of all
  other ranks. Add up the sums of the block's tokens whose last experts, of all ranks, are of this stage.

An item waits for the product, or for items that stand before it in other ranks' lists. So whoever takes the first of
those that are not done can go on.

Over the link: as in combine, and a flag an item. Results are the same bits: each token's sums have the same order.

The launch begins while the product runs, and so reads nothing before it has seen, with acquire, that the product has
begun, which is after all launches before it. It ends after the product's end. A flag is the number of the call, and
only rises. Why the next dispatch of rank s may write to rank d: all flags of d here are set, those of blocks without
tokens too, and d reads what came from s before it sets them. What d has yet to do concerns other ranks. (The list does
not depend on the tokens that there are, which a program that begins late could find changed.)
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from iris import simulator
from iris.compat.cuda import current_raw_stream, is_current_stream_capturing
from iris.experts.expert_parallel import ExpertParallel
from iris.experts.memory import STAGED_TOKENS
from iris.experts.numbering import load_sent_choices
from iris.experts.received import Received
from iris.experts.routing import choices, has_bit, owner_bits, wait_others
from iris.experts.token_rows import DISPATCHED, UNWEIGHTED, places_of, sum_of_rows
from iris.heap import describe_address
from iris.heap.history import debugging
from iris.language.barrier import lanes
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.ordering import wait
from iris.language.target import on_nvidia
from iris.operators.version_counter import bump_version
from iris.ops.grouped.call import GroupedCall
from iris.ops.grouped.on_hopper import hopper_tiles
from iris.ops.grouped.stages import stage_of, stages_of, tiles_of_stage
from iris.ops.kernel_arguments import by_name
from iris.runtime.launch import addresses, prepare, remember

# Of a block.
TOKENS = tl.constexpr(STAGED_TOKENS)
# Bytes of a row that a program moves at a time: two vectors of 16 for each of 256 threads, of each choice.
BLOCK_BYTES, NUM_WARPS = 8192, 8
# Of a thread: so that a multiprocessor has room for two programs (CUDA C++ Programming Guide, "Compute Capabilities":
# 65536 registers), since those that the product leaves free are few.
REGISTERS = 128

DEBUGGING = debugging()

# What launches kernels of one kind.
_prepared: dict[tuple, Callable[..., None]] = {}


@triton.jit
def of_stage(offsets, rows, stage, STAGES: tl.constexpr):
    """Which of these rows are of experts of this stage; -1 are of none."""
    # It ends where the last UNIT * (2 ** stage - 1) experts begin.
    end = STAGES.GROUPS - STAGES.UNIT * ((1 << stage) - 1)
    begin = tl.maximum(end - (STAGES.UNIT << stage), 0)
    return (rows >= tl.load(offsets + begin)) & (rows < tl.load(offsets + end))


@triton.jit
def load_places(places, token, there, EXTENTS: tl.constexpr):
    """The rows of these tokens' choices on this rank, a line each, -1 for none. ``token``: of all ranks'."""
    k = choices(EXTENTS)
    mask = there[:, None] & (k < EXTENTS.K)[None, :]
    return tl.load(places + token[:, None] * EXTENTS.K + k[None, :], mask=mask, other=-1)


@triton.jit
def send(
    ctx,
    slot,
    y,
    layout,
    source,
    first,
    stage,
    BLOCK: tl.constexpr,
    WEIGHTS: tl.constexpr,
    EXTENTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of the block of tokens of rank ``source`` from ``first`` on."""
    token, region = first + tl.arange(0, TOKENS), tl.cast(source, tl.int64) * EXTENTS.M
    places = load_places(layout.places, region + token, token < tl.load(slot.tokens + source), EXTENTS)
    left = of_stage(layout.offsets, tl.max(places, axis=1), stage, STAGES)
    while tl.max(left.to(tl.int32), axis=0) > 0:
        chosen = tl.min(tl.where(left, token, first + TOKENS), axis=0)
        left = left & (token != chosen)
        rows, weights = places_of(slot, layout.places, region + chosen, True, WEIGHTS=WEIGHTS, EXTENTS=EXTENTS)
        target = slot.partials + (tl.cast(ctx.cur_rank, tl.int64) * EXTENTS.M + chosen) * EXTENTS.H
        for start in range(0, EXTENTS.H, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            total = sum_of_rows(y, rows, weights, columns, WEIGHTS=WEIGHTS, EXTENTS=EXTENTS)
            rounded = total.to(slot.partials.dtype.element_ty)
            ctx.store(target + columns, rounded, source, mask=columns < EXTENTS.H)


@triton.jit
def finish(
    ctx,
    slot,
    y,
    layout,
    out,
    first,
    stage,
    BLOCK: tl.constexpr,
    WEIGHTS: tl.constexpr,
    EXTENTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of the block of own tokens from ``first`` on. Those without experts are of the first stage."""
    rank = ctx.cur_rank
    token, region = first + tl.arange(0, TOKENS), tl.cast(rank, tl.int64) * EXTENTS.M
    there = token < tl.load(slot.tokens + rank)
    expert = load_sent_choices(slot, region + token, there, EXTENTS)
    stages = tl.where(expert >= 0, stage_of(expert % EXTENTS.LOCAL, STAGES), STAGES.NUMBER - 1)
    left = (tl.min(stages, axis=1) == stage) & there
    while tl.max(left.to(tl.int32), axis=0) > 0:
        chosen = tl.min(tl.where(left, token, first + TOKENS), axis=0)
        left = left & (token != chosen)
        rows, weights = places_of(slot, layout.places, region + chosen, True, WEIGHTS=WEIGHTS, EXTENTS=EXTENTS)
        # Of a block of this one token.
        one = chosen + tl.arange(0, 1)
        bits = tl.max(owner_bits(load_sent_choices(slot, region + one, one >= 0, EXTENTS), EXTENTS), axis=0)
        for start in range(0, EXTENTS.H, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < EXTENTS.H
            own_sum = sum_of_rows(y, rows, weights, columns, WEIGHTS=WEIGHTS, EXTENTS=EXTENTS)
            total = tl.zeros_like(own_sum)
            for expert_rank in range(EXTENTS.W):
                if expert_rank == rank:
                    total += own_sum
                else:
                    at = (tl.cast(expert_rank, tl.int64) * EXTENTS.M + chosen) * EXTENTS.H + columns
                    sent = has_bit(bits, expert_rank) & inside
                    total += tl.load(slot.partials + at, mask=sent, other=0).to(tl.float32)
            target = out + tl.cast(chosen, tl.int64) * EXTENTS.H + columns
            tl.store(target, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def await_product(
    ctx, layout, progress, tiles_n, stage, stored, BLOCK_M: tl.constexpr, EXTENTS: tl.constexpr, STAGES: tl.constexpr
):
    """Until the product has stored all tiles of this stage and those before it. Returns the stage.

    ``stored``: from which stage on that is known.
    """
    for each in range(stage, stored):
        tiles = tiles_of_stage(layout.counts, each, BLOCK_M, tiles_n, GROUPS=EXTENTS.LOCALS, STAGES=STAGES)
        wait(progress.finished + each, tiles, "reached", ctx._record())
    return tl.minimum(stage, stored)


@triton.jit(do_not_specialize=["tiles_n"])
def combine_in_stages(
    slot,
    staged,
    y,
    layout,
    out,
    progress,
    tiles_n,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTS: tl.constexpr,
    EXTENTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``y``: the product's result, in the ``layout`` of the dispatch, a `Layout`. ``out``: ``[tokens, H]``.

    ``slot``, ``staged``: of the dispatch, a `Slot` and its flags of `iris.experts.memory`. ``progress``: the product's
    `Progress`, whose tiles have ``BLOCK_M`` rows, and ``tiles_n`` of them are side by side. ``BLOCK``: elements of a
    row that are moved at a time. ``WEIGHTS``: by which rows are multiplied, `UNWEIGHTED` or `DISPATCHED`.
    """
    ctx = DeviceContext.initialize(slot.context, num_ranks=EXTENTS.W)
    wait(progress.begun, 1, "reached", ctx._record())
    call = tl.load(slot.calls)
    blocks, W = tl.cdiv(EXTENTS.M, TOKENS), EXTENTS.W
    # Of a stage: first what is sent, then what is finished of the one before. After stage 0 there is nothing to send.
    items = blocks * W
    end = STAGES.NUMBER * items + blocks
    stored = tl.cast(STAGES.NUMBER, tl.int32)
    item = tl.atomic_add(progress.tickets, 1, sem="relaxed", scope="gpu")
    while item < end:
        # How many stages were sent before, and which block of this rank's (distance W) or another's.
        before, number = item // items, item % items
        if before == STAGES.NUMBER:
            number += blocks * (W - 1)
        first, distance = number % blocks * TOKENS, number // blocks + 1
        sends = distance < W
        stage = STAGES.NUMBER - before - tl.where(sends, 1, 0)
        stored = await_product(
            ctx,
            layout,
            progress,
            tiles_n=tiles_n,
            stage=stage,
            stored=stored,
            BLOCK_M=BLOCK_M,
            EXTENTS=EXTENTS,
            STAGES=STAGES,
        )
        if sends:
            source = (ctx.cur_rank + distance) % W
            send(
                ctx,
                slot,
                y,
                layout,
                source=source,
                first=first,
                stage=stage,
                BLOCK=BLOCK,
                WEIGHTS=WEIGHTS,
                EXTENTS=EXTENTS,
                STAGES=STAGES,
            )
            flag = staged + (ctx.cur_rank * STAGES.NUMBER + stage) * blocks + first // TOKENS
            ctx.signal(flag, call, source)
        elif before > 0:
            # A token's sums of other ranks may be of earlier stages, which other programs may have sent.
            for earlier in range(stage, STAGES.NUMBER):
                wait_others(ctx, staged + (lanes() * STAGES.NUMBER + earlier) * blocks + first // TOKENS, call)
            finish(
                ctx,
                slot,
                y,
                layout,
                out=out,
                first=first,
                stage=stage,
                BLOCK=BLOCK,
                WEIGHTS=WEIGHTS,
                EXTENTS=EXTENTS,
                STAGES=STAGES,
            )
        item = tl.atomic_add(progress.tickets, 1, sem="relaxed", scope="gpu")
    # The next launch waits for this one alone, and not for the product.
    gdc_wait()


def arguments_of(ep: ExpertParallel, slot: int, weighted: bool, product: GroupedCall, out: torch.Tensor) -> tuple:
    """Of the kernel, beside a product with a progress, by the tiles for Hopper."""
    memory, tiles = ep._calls.open_memory(), hopper_tiles(product)
    return by_name(
        combine_in_stages,
        slot=memory.slots[slot],
        staged=memory.staged[slot],
        y=product.out,
        layout=memory.layouts[slot]["compact"],
        out=out,
        progress=product.progress,
        tiles_n=-(-product.columns // tiles.block_size_n),
        BLOCK_M=tiles.block_size_m,
        BLOCK=min(BLOCK_BYTES // out.itemsize, 1 << (ep.hidden - 1).bit_length()),
        WEIGHTS=(DISPATCHED if weighted else UNWEIGHTED).value,
        EXTENTS=ep._calls.extents,
        STAGES=stages_of(ep.num_local_experts),
    )


def prepared(ep: ExpertParallel, given: tuple) -> Callable[..., None]:
    """What launches it with such arguments, with as many programs as combine has to send."""
    programs, out = ep._calls.extents.PROGRAMS, given[4]
    key = (out.device.index, programs, out.dtype, out.data_ptr() % 16, given[7:])
    run = _prepared.get(key)
    if run is None:
        options: dict[str, Any] = {"maxnreg": REGISTERS} if on_nvidia() else {}
        run = prepare(combine_in_stages, (programs, 1, 1), *given, num_warps=NUM_WARPS, **options)
        remember(_prepared, key, run)
    return run


def enqueue(ep: ExpertParallel, received: Received, given: tuple) -> None:
    """In place of ``ep.combine``, as the next launch after the product."""
    run, out = prepared(ep, given), given[4]
    if DEBUGGING and not (out.is_cuda and is_current_stream_capturing()):
        ep._calls.compare(f"combine in stages, in slot {received._slot}")
    run(None if simulator.ACTIVE else current_raw_stream(out.device.index), addresses(given))
    if simulator.ACTIVE:
        # It is over, and so what has gone wrong in it is known.
        ep._calls.abort_flag.raise_recorded(describe_address)
    bump_version(out)
    ep._calls.end(received, "experts_mlp()")
