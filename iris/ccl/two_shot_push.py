"""Medium all_reduce of floating-point types: two shot, where each element is its own flag (Lamport).

W is the number of ranks, n the bytes of a rank's input. As in `iris.ccl.one_shot`, whose slots, epochs and waits these
are, nothing but data travels. Two shot sends less and takes longer: 2 (W - 1) / W n bytes, in two steps. A block has W
parts of PART elements. Of each block:

1. Each rank pushes part d to rank d, for all other ranks d.
2. Rank d waits for its part from all of them, adds up in the order of ranks, and pushes the sum to all others.
3. Each rank waits for the sums of all parts, and stores them to the output.

A program does each step for all of its blocks before the next: with two waits a block there is always one to go on
with. (In passes of some blocks, with a fence between them, a slot would do for tensors of any size. On 2 H200 that took
as long as `iris.ccl.pull`, 49 us for 12 MiB and 207 for 64, so there are none.) Larger tensors are
`iris.ccl.two_shot_direct`'s.

(`iris.ccl.two_shot` is another algorithm, for any size and type. This one's memory is six times the tensor: see
`iris.ccl.lamport_channel` for how large that may be.)

Reuse: as in `iris.ccl.one_shot`. A rank without a part, beyond the end of the tensor, sends no sum. But it has
contributed to rank 0's, which all receive.
"""

import functools

import triton.language as tl

from iris.ccl.call import Algorithm, Call
from iris.ccl.communicator import Launch, power_of_two
from iris.ccl.kernel_launch import kernel_launch
from iris.ccl.lamport_channel import fits, has_room
from iris.ccl.one_shot import LAMPORT, LIMITS, launch_arguments, peers, push, recv_and_reduce, recycle_slot, region
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_launch_dependents, gdc_wait
from iris.language.flat import flat
from iris.language.jit import jit
from iris.language.lamport import decode, elements_per_word, encode, lamport_recv


@jit
def push_parts(ctx, slot, input, block, n, bases, W: tl.constexpr, PART: tl.constexpr):
    """Step 1 of a block: push part d to rank d, into its copy of the ``slot``."""
    rank, i = ctx.cur_rank, flat(PART, input.dtype.element_ty)
    # All loads first: the compiler must assume that the stores change what a later load reads.
    parts = ()
    for distance in tl.static_range(1, W):
        k = (block * W + (rank + distance) % W) * PART + i
        parts += (tl.load(input + k, mask=k < n),)
    for distance in tl.static_range(1, W):
        count = n - (block * W + (rank + distance) % W) * PART
        push(ctx, slot + rank * PART, i, parts[distance - 1], count=count, bases=bases, distance=distance, W=W)


@jit
def as_received(values):
    """The ``values`` that the receiver of a `push` gets; other bits than these have at most some NaNs.

    Made of the words that travel, where these are of fp8: so what is converted to fp8, two numbers in a register, has
    one use. Where it had another beside the words, ptxas 12.8 (Triton 3.6) moved a store of single bytes ahead of the
    conversion (`tests/codegen/converted_pairs.py`).
    """
    if values.dtype.primitive_bitwidth == 8:
        return decode(encode(values), values, values.dtype)
    else:
        return values


@jit
def recv_sums(ctx, sums, output, begin, count, expected, W: tl.constexpr, RANKS: tl.constexpr, PART: tl.constexpr):
    """Step 3 of a block: wait for the first ``expected`` elements of other ranks' ``sums``, and store ``count``.

    They lie beside each other as they do in the output, from element ``begin`` on. ``RANKS``: as of the kernel.
    """
    rank = ctx.cur_rank
    element: tl.constexpr = output.dtype.element_ty
    WORDS: tl.constexpr = PART // elements_per_word(element)
    event = ctx.tracing.begin_wait_for_data(sums, rank)
    (words,) = lamport_recv(
        sums, rank, expected, WORDS=RANKS * WORDS, PARTS=1, STRIDE=WORDS, element=element, record=ctx._record()
    )
    ctx.tracing.record_event_end(event)
    j = flat(RANKS * PART, element)
    tl.store(output + begin + j, decode(words, j, element), mask=(j < count) & (j // PART != rank))


@jit
def two_shot_push(
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
    """As for `iris.ccl.one_shot`; ``RANKS``: the power of two from W on."""
    ctx = DeviceContext.initialize(channel.context, num_ranks=W)
    rank, bases = ctx.cur_rank, peers(ctx, W)
    gdc_wait()
    if EARLY:
        gdc_launch_dependents()
    epochs, slots = channel.epochs, channel.slots
    element: tl.constexpr = input.dtype.element_ty
    i = flat(PART, element)
    REGION: tl.constexpr = 2 * W * PART
    blocks = (n + W * PART - 1) // (W * PART)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        slot = region(slots, channel.max_blocks, block, tl.load(epochs + block), REGION=REGION)
        push_parts(ctx, slot, input, block, n=n, bases=bases, W=W, PART=PART)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        received = region(slots, channel.max_blocks, block, tl.load(epochs + block), REGION=REGION)
        k = (block * W + rank) * PART + i
        own = tl.load(input + k, mask=k < n)
        event = ctx.tracing.begin_wait_for_data(received, rank)
        count = n - (block * W + rank) * PART
        total = recv_and_reduce(ctx, received, own, count, W=W, PART=PART, OP=OP, factors=factors)
        ctx.tracing.record_event_end(event)
        tl.store(output + k, as_received(total), mask=k < n)
        for distance in tl.static_range(1, W):
            push(ctx, received + (W + rank) * PART, i, total, count=count, bases=bases, distance=distance, W=W)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        epoch = tl.load(epochs + block)
        recycle_slot(ctx, channel, block, epoch, W=W, PART=PART, STEPS=2)
        sums = region(slots, channel.max_blocks, block, epoch, REGION=REGION) + W * PART
        count = tl.minimum(n - block * W * PART, W * PART)
        recv_sums(ctx, sums, output, block * W * PART, count=count, expected=count, W=W, RANKS=RANKS, PART=PART)


def launch(call: Call, max_programs: int | None) -> Launch:
    """A launch of all_reduce, of at most ``max_programs`` programs."""
    shared = launch_arguments(call, max_programs, steps=2)
    return kernel_launch(call, two_shot_push, **shared, RANKS=power_of_two(call.comm.size))


ALGORITHMS = (
    Algorithm(
        "two_shot_push",
        ("all_reduce",),
        launch,
        dtypes=LAMPORT,
        min_ranks=2,
        fits=functools.partial(fits, steps=2),
        has_room=functools.partial(has_room, steps=2),
        limits=LIMITS,
    ),
)
