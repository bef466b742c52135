"""Small and medium all_reduce and reduce_scatter: ranks push data, and each element is its own flag (Lamport).

W is the number of ranks, n the bytes of a rank's input. The tables of `iris.ccl.select`, which choose by size, call the
kernels "one_shot" and "two_shot_push". (`iris.ccl.two_shot` is another algorithm, for any size and type.)

*One shot* is the small all-reduce. Each rank sends its whole input to every other rank, and adds up all W inputs
itself: (W - 1) n bytes leave it, in one step. The input is cut into blocks of PART elements, with a program for each,
but by default at most two for each multiprocessor. For each of its blocks, a program does this:

1. It loads the block, and stores it to every other rank (`push`): into the current *slot*, which is staging memory with
   a place for each source. A slot lies at the same offset in each heap.
2. An element travels with its bits inverted. The slot was zero before, and no element is sent as zero. So an element
   that is not zero has arrived (`iris.language.lamport`). The load that shows this also has the value, so there is no
   flag, no fence and no barrier. Integers have no value to spare for "missing", so the types are floating-point ones.
3. It polls the blocks from all ranks together, until no element is missing, and adds them up in the order of ranks
   (`recv_and_reduce`). The sum is rounded once, and stored to the output. All ranks get the same bits.
4. It clears the slot of the call before, and advances the epoch of the block (`recycle_slot`).

In reduce_scatter each rank pushes another part of its input to each: (W - 1) / W n bytes.

*Two shot* sends less and takes longer: 2 (W - 1) / W n bytes, in two steps. A block has W parts of PART elements.
Rank d adds up part d of each block, as above. It pushes the sum to all others, which wait for it in the same way.

For example, 8 KiB of bf16 among 4 GPUs are 16 blocks of 512 bytes in one shot, and 16 programs of one warp. Each sends
its block to 3 peers and receives 3 blocks.

Reuse. A channel is zero at first and belongs to one stream, or one line of graphs (`iris.runtime.workspace`). So its
calls run one after another. It has 3 slots, each with a region for each block, ``[steps, W sources, PART elements]``.
Call e is the e-th call that uses the block; a smaller call that has no such block does not count. Call e uses slot
e % 3. It clears the whole region in slot (e - 1) % 3, as the last call may have used more of it. Why no rank writes to
a slot that is not cleared:

1. A peer writes to slot e % 3 of this rank in its call e. In its call e - 1 it has received data from this rank.
2. This rank sent them in its own call e - 1, a kernel that ran after its call e - 2 had ended.
3. In call e - 2 this rank cleared slot (e - 3) % 3 = e % 3, which it had read in call e - 3.
4. So the clears had reached this GPU's L2 cache before the data of line 2 left, and the peer's stores come to the same
   cache later. (That is the hardware. PTX's memory model would want a release in line 2 and an acquire in line 1.)

With two slots this rank would be clearing one while the peer writes to it. (In two shot a rank without a part, beyond
the end of the tensor, sends no sum. But it has contributed to rank 0's, which all receive.)
"""

import functools
from typing import Any, NamedTuple

import torch
import triton.language as tl

from iris.ccl.call import Algorithm, Call
from iris.ccl.combine import accumulate, accumulator, finalize
from iris.ccl.communicator import Communicator, Launch, power_of_two
from iris.ccl.kernel_arguments import LamportChannel
from iris.ccl.kernel_launch import INTEGERS, fitting, kernel_launch
from iris.ccl.queue import flat
from iris.language.address import translate
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_launch_dependents, gdc_wait
from iris.language.failures import WAIT_LIMIT_NS, exceeded, untimed
from iris.language.jit import jit
from iris.language.lamport import (
    decode,
    elements_per_word,
    lamport_clear,
    lamport_recv,
    lamport_send,
    missing_elements,
    sentinel_mask,
    word_type,
    words_at,
)
from iris.language.ll import record_missing
from iris.language.ordering import load_relaxed, store_after_sync
from iris.language.target import threads_per_warp

# Bytes of all W ranks' parts together, for one block, at most. Each part is a power of two.
BLOCK_BYTES = 8192
# What a warp moves at once. Parts have this size as long as every block gets a program of its own.
WARP_BYTES = 512
SLOTS = tl.constexpr(3)
# Blocks that a program sends before it waits for the first of them, so that the links are busy while it adds up.
AHEAD = tl.constexpr(1)
# A channel is several times as large as the tensor, and each stream has one. So it may take this fraction (1/16).
SHARE_OF_WORKSPACE = 16


def part_bytes(size: int, share: int, programs: int) -> int:
    """Bytes of a rank's part of a block. Each of ``size`` ranks adds up ``share`` bytes, by so many ``programs``."""
    # At least a word of 8 bytes for each thread of a warp: no two threads may poll the same word (`lamport_recv`).
    largest = max(8 * threads_per_warp(), BLOCK_BYTES // (1 << (size - 1).bit_length()))
    part = min(WARP_BYTES, largest)
    while part < largest and part * programs < share:
        part *= 2
    return part


@jit
def recv_and_reduce(ctx, parts, own, k, count, W: tl.constexpr, PART: tl.constexpr, OP: tl.constexpr, factors=None):
    """Wait for the first ``count`` elements of every rank's part and combine them in the order of ranks.

    ``own`` is the caller's; ``k``: numbers of all words of a part. All parts are read in each round of polling, so
    that their loads are under way together. Words beyond ``count`` are read too: a mask would break vector loads up.
    """
    rank, record = ctx.cur_rank, ctx._record()
    element: tl.constexpr = own.dtype
    ACC: tl.constexpr = accumulator(element)
    WORDS: tl.constexpr = PART // elements_per_word(element)
    begins, bits = words_at(parts, element), sentinel_mask(k, count, element)
    if WAIT_LIMIT_NS > 0:
        since = untimed()
    words = ()
    for _s in tl.static_range(W):
        words += (bits * 0,)
    missing = 1
    while missing > 0:
        words = ()
        for s in tl.static_range(W):
            words += (load_relaxed(begins + (s * WORDS + k), (k < WORDS) & (rank != s)),)
        late = bits * 0
        for s in tl.static_range(W):
            late = late | tl.where(rank == s, 0, missing_elements(words[s], bits, element))
        missing = tl.max(tl.cast(late != 0, tl.int32), axis=0)
        if WAIT_LIMIT_NS > 0:
            if missing > 0:
                over, since = exceeded(record, since)
                if over:
                    ranks = tl.cast(0, tl.int64)
                    for s in tl.static_range(W):
                        none = (rank != s) & (missing_elements(words[s], bits, element) != 0)
                        ranks = ranks | (tl.cast(tl.max(tl.cast(none, tl.int32), axis=0), tl.int64) << s)
                    record_missing(begins + k, bits != 0, 0, ranks, record=record)
                    missing = missing * 0
    total = tl.cast(own, ACC)
    for s in tl.static_range(W):
        value = tl.where(rank == s, tl.cast(own, ACC), tl.cast(decode(words[s], element, own), ACC))
        total = accumulate(total, value, factors, s, OP=OP)
    return finalize(total, element, W, OP)


@jit
def peers(ctx, W: tl.constexpr):
    """Where the workspaces of the other ranks begin, the right neighbour first."""
    bases = ()
    for distance in tl.static_range(1, W):
        bases += (tl.load(ctx.table + (ctx.cur_rank + distance) % W),)
    return bases


@jit
def push(ctx, ptr, i, values, mask, bases, distance: tl.constexpr, W: tl.constexpr):
    """Send elements to the rank ``distance`` to the right, into its copy of ``ptr``, as tracing records it.

    ``bases``: of the `peers`.
    """
    event = ctx.tracing.begin_move("store", ptr + i, (ctx.cur_rank + distance) % W, mask)
    lamport_send(translate(ptr, ctx.base, bases[distance - 1]) + i, values, mask)
    ctx.tracing.record_event_end(event)


@jit
def region(slots, max_blocks, block, epoch, REGION: tl.constexpr):
    """The region of a block in the slot of an epoch. In a slot, the regions of all blocks are contiguous."""
    return slots + (tl.cast(epoch % SLOTS, tl.int64) * max_blocks + block) * REGION


@jit
def recycle_slot(ctx, channel, block, epoch, j, W: tl.constexpr, PART: tl.constexpr, STEPS: tl.constexpr):
    """Clear what peers have put into the slot of the epoch before, and go on to the next epoch."""
    old = region(channel.slots, channel.max_blocks, block, epoch + (SLOTS - 1), REGION=STEPS * W * PART)
    for step in tl.static_range(STEPS):
        lamport_clear(old + step * W * PART + j, (j < W * PART) & (j // PART != ctx.cur_rank))
    store_after_sync(channel.epochs + block, (epoch + 1) % SLOTS)


@jit
def one_shot(
    channel,
    input,
    output,
    factors,
    n,
    send_step,
    W: tl.constexpr,
    RANKS: tl.constexpr,
    PART: tl.constexpr,
    OP: tl.constexpr,
    SAME: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``n``: elements, not bytes, of the output. ``RANKS``: the power of two from W on. ``PART``: elements of a part.

    ``send_step``: elements from one destination's part of the input to the next one's; 0 if all get the `SAME`.
    ``EARLY``: let the next kernel of the stream begin early (`gdc_launch_dependents`).
    """
    ctx = DeviceContext.initialize(channel.context, num_ranks=W)
    rank, bases = ctx.cur_rank, peers(ctx, W)
    gdc_wait()
    if EARLY:
        gdc_launch_dependents()
    epochs, slots = channel.epochs, channel.slots
    element: tl.constexpr = input.dtype.element_ty
    i = flat(PART, element)
    j = flat(RANKS * PART, element)
    words = flat(PART // elements_per_word(element), word_type(element))
    first, stride = tl.program_id(0), tl.num_programs(0)
    rounds = ((n + PART - 1) // PART - first + stride - 1) // stride
    for round in range(0, rounds + AHEAD):
        if round < rounds:
            block = first + round * stride
            mine = region(slots, channel.max_blocks, block, tl.load(epochs + block), REGION=W * PART) + rank * PART
            k = block * PART + i
            # All loads first: the compiler must assume that the stores change what a later load reads.
            parts = ()
            for distance in tl.static_range(1, W):
                to = tl.cast((rank + distance) % W, tl.int64)
                if SAME and distance > 1:
                    parts += (parts[0],)
                else:
                    parts += (tl.load(input + to * send_step + k, mask=k < n),)
            for distance in tl.static_range(1, W):
                push(ctx, mine, i, parts[distance - 1], mask=k < n, bases=bases, distance=distance, W=W)
        if round >= AHEAD:
            block = first + (round - AHEAD) * stride
            epoch = tl.load(epochs + block)
            k = block * PART + i
            own = tl.load(input + tl.cast(rank, tl.int64) * send_step + k, mask=k < n)
            received = region(slots, channel.max_blocks, block, epoch, REGION=W * PART)
            event = ctx.tracing.begin_wait_for_data(received, rank)
            left = n - block * PART
            total = recv_and_reduce(ctx, received, own, words, count=left, W=W, PART=PART, OP=OP, factors=factors)
            ctx.tracing.record_event_end(event)
            tl.store(output + k, total, mask=k < n)
            recycle_slot(ctx, channel, block, epoch, j=j, W=W, PART=PART, STEPS=1)


@jit
def two_shot(
    channel,
    input,
    output,
    factors,
    n,
    W: tl.constexpr,
    RANKS: tl.constexpr,
    PART: tl.constexpr,
    OP: tl.constexpr,
    EARLY: tl.constexpr,
):
    ctx = DeviceContext.initialize(channel.context, num_ranks=W)
    rank, bases = ctx.cur_rank, peers(ctx, W)
    gdc_wait()
    if EARLY:
        gdc_launch_dependents()
    epochs, slots = channel.epochs, channel.slots
    element: tl.constexpr = input.dtype.element_ty
    WORDS: tl.constexpr = PART // elements_per_word(element)
    i = flat(PART, element)
    j = flat(RANKS * PART, element)
    words, all_words = flat(WORDS, word_type(element)), flat(RANKS * WORDS, word_type(element))
    first, stride = tl.program_id(0), tl.num_programs(0)
    rounds = ((n + W * PART - 1) // (W * PART) - first + stride - 1) // stride
    for round in range(0, rounds + 2 * AHEAD):
        if round < rounds:
            block = first + round * stride
            mine = region(slots, channel.max_blocks, block, tl.load(epochs + block), REGION=2 * W * PART) + rank * PART
            parts = ()
            for distance in tl.static_range(1, W):
                k = (block * W + (rank + distance) % W) * PART + i
                parts += (tl.load(input + k, mask=k < n),)
            for distance in tl.static_range(1, W):
                k = (block * W + (rank + distance) % W) * PART + i
                push(ctx, mine, i, parts[distance - 1], mask=k < n, bases=bases, distance=distance, W=W)
        if (round >= AHEAD) & (round < rounds + AHEAD):
            block = first + (round - AHEAD) * stride
            received = region(slots, channel.max_blocks, block, tl.load(epochs + block), REGION=2 * W * PART)
            k = (block * W + rank) * PART + i
            own = tl.load(input + k, mask=k < n)
            event = ctx.tracing.begin_wait_for_data(received, rank)
            left = n - (block * W + rank) * PART
            total = recv_and_reduce(ctx, received, own, words, count=left, W=W, PART=PART, OP=OP, factors=factors)
            ctx.tracing.record_event_end(event)
            tl.store(output + k, total, mask=k < n)
            for distance in tl.static_range(1, W):
                push(ctx, received + (W + rank) * PART, i, total, mask=k < n, bases=bases, distance=distance, W=W)
        if round >= 2 * AHEAD:
            block = first + (round - 2 * AHEAD) * stride
            epoch = tl.load(epochs + block)
            k = block * W * PART + j
            # The sums lie beside each other as they do in the output.
            there = (j < W * PART) & (j // PART != rank) & (k < n)
            sums = region(slots, channel.max_blocks, block, epoch, REGION=2 * W * PART) + W * PART
            sources = all_words // WORDS
            others = (sources < W) & (sources != rank)
            bits = tl.where(others, sentinel_mask(all_words, n - block * W * PART, element), 0)
            event = ctx.tracing.begin_wait_for_data(sums, rank)
            ptrs = words_at(sums, element) + all_words
            total = lamport_recv(ptrs, others, bits, element, like=j, source=sources, record=ctx._record())
            ctx.tracing.record_event_end(event)
            tl.store(output + k, total, mask=there)
            recycle_slot(ctx, channel, block, epoch, j=j, W=W, PART=PART, STEPS=2)


class ChannelLayout(NamedTuple):
    """The memory of calls of similar size: the number of blocks is rounded up to a power of two, so that they share it.

    ``part``: bytes of a rank's part of a block. ``max_blocks``: blocks that a slot has room for. ``nbytes``: of the
    channel, which is the slots, and behind them the epochs, int32 ``[max_blocks]``. So the slots are aligned.
    """

    part: int
    max_blocks: int
    nbytes: int

    @property
    def epochs(self) -> slice:
        """Where they are in the channel."""
        return slice(self.nbytes - 4 * self.max_blocks, self.nbytes)


def channel_layout(size: int, steps: int, nbytes: int, programs: int) -> ChannelLayout:
    """For a sum of ``nbytes`` among ``size`` ranks in so many steps, with ``programs`` programs."""
    part = part_bytes(size, nbytes // (1 if steps == 1 else size), programs)
    max_blocks = power_of_two(max(1, -(-nbytes // (part if steps == 1 else part * size))))
    return ChannelLayout(part, max_blocks, max_blocks * (4 + SLOTS.value * steps * size * part))


def launch_one_shot(call: Call, max_programs: int | None) -> Launch:
    """A launch of all_reduce or reduce_scatter in one step, of at most ``max_programs`` programs."""
    same = call.collective == "all_reduce"
    shared = _shared_arguments(call, max_programs, steps=1)
    return kernel_launch(call, one_shot, **shared, send_step=0 if same else shared["n"], SAME=same)


def launch_two_shot(call: Call, max_programs: int | None) -> Launch:
    """A launch of all_reduce in two steps, of at most ``max_programs`` programs."""
    return kernel_launch(call, two_shot, **_shared_arguments(call, max_programs, steps=2))


def _shared_arguments(call: Call, max_programs: int | None, steps: int) -> dict[str, Any]:
    """Programs, warps, and the arguments that both kernels have."""
    comm, (dtype, _, op) = call.comm, call.elements
    # Of what each rank wants. In reduce_scatter that is another part of the input for each.
    n = call.elements.number_in(call.output)
    max_programs = max_programs or 2 * comm.num_sms
    layout = channel_layout(comm.size, steps, n * dtype.itemsize, max_programs)
    use = f"push of {layout.max_blocks} blocks of {layout.part} bytes in {steps} steps of all_reduce or reduce_scatter"
    channel = comm.workspace.channel(use, call.line, layout.nbytes, layout.epochs)
    part = layout.part // dtype.itemsize
    blocks = -(-n // (part if steps == 1 else part * comm.size))
    # No more warps than there is data for: they poll together.
    warps = min(call.config.warps(part, dtype.itemsize), max(1, layout.part // WARP_BYTES))
    return dict(
        programs=fitting(comm, max(1, min(blocks, max_programs)), warps),
        num_warps=warps,
        dtype=dtype,
        channel=LamportChannel(
            context=channel.context_tensor,
            epochs=channel.memory[layout.epochs].view(torch.int32),
            slots=channel.memory[: layout.epochs.start].view(INTEGERS[dtype.itemsize]),
            max_blocks=layout.max_blocks,
        ),
        n=n,
        W=comm.size,
        RANKS=power_of_two(comm.size),
        PART=part,
        OP=op,
    )


def fits(comm: Communicator, collective: str, nbytes: int, steps: int) -> bool:
    """Whether a call does not take more than its share of the group's memory."""
    nbytes = nbytes // comm.size if collective == "reduce_scatter" else nbytes
    needed = channel_layout(comm.size, steps, nbytes, 2 * comm.num_sms).nbytes
    return needed <= comm.workspace.limit // SHARE_OF_WORKSPACE


# Dtypes whose elements can be their own flags: all ones are a NaN (`iris.language.lamport`).
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2
LAMPORT = frozenset(FLOATS)

STEPS = {"one_shot": 1, "two_shot_push": 2}  # of each algorithm

ALGORITHMS = (
    Algorithm(
        "one_shot",
        ("all_reduce", "reduce_scatter"),
        launch_one_shot,
        dtypes=LAMPORT,
        min_ranks=2,
        fits=functools.partial(fits, steps=STEPS["one_shot"]),
        limits="is for floating-point tensors, whose elements can be their own flags",
    ),
    Algorithm(
        "two_shot_push",
        ("all_reduce",),
        launch_two_shot,
        dtypes=LAMPORT,
        min_ranks=2,
        fits=functools.partial(fits, steps=STEPS["two_shot_push"]),
    ),
)
