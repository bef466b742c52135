"""Small all_reduce and reduce_scatter: one shot, where each element is its own flag (Lamport).

W is the number of ranks, n the bytes of a rank's input. Each rank sends its whole input to every other rank, and adds
up all W inputs itself: (W - 1) n bytes leave it, in one step. The input is cut into blocks of PART elements. There is a
program for each block, but by default at most two programs for each multiprocessor; in a larger call a program has
several blocks. The kernel is `one_shot`, at the end. For each block a program does this:

1. It loads the block and stores it to every other rank (`send_block`), into the current *slot* of that rank. A slot is
   staging memory with a place for each source, at the same offset in every rank's heap.
2. While the data are under way it clears the slot of the call before, and advances the block's epoch (`recycle_slot`).
3. It polls its own slot until the block is there from all ranks (`recv_and_reduce`). An element travels with its bits
   inverted, and the slot is zero until then. No element is sent as zero: the one whose inverse is zero is a NaN, and is
   sent as another NaN. So an element that is not zero has arrived (`iris.language.lamport`). The load that shows this
   also has the value, so there is no flag, no fence and no barrier. Integers have no value to spare for "missing", so
   the types are floating-point ones.
4. It adds the W blocks up in the order of ranks, rounds the sum once, and stores it to the output. All ranks get the
   same bits.

A program with several blocks sends the next one (step 1) before it waits for this one (steps 2 to 4).

In reduce_scatter each rank pushes another part of its input to each: (W - 1) / W n bytes.

For example, 8 KiB of bf16 among 4 GPUs are 16 blocks of 512 bytes in one shot, and 16 programs of one warp. Each sends
its block to 3 peers and receives 3 blocks.

Reuse. The slots and epochs are in a *channel*: memory that is zero at first and serves the calls of one stream, or of
CUDA graphs that never run at once (`iris.runtime.workspace`). So its calls run one after another. It has 3 slots, each
with a region for each block, ``[steps, W sources, PART elements]``. Call e is the e-th call that uses the block; a
smaller call that has no such block does not count. Call e uses slot e % 3. It clears the whole region in slot
(e - 1) % 3, as the last call may have used more of it. Why no rank writes to a slot that is not cleared:

1. A peer writes to slot e % 3 of this rank in its call e. In its call e - 1 it has received data from this rank.
2. This rank sent them in its own call e - 1, a kernel that ran after its call e - 2 had ended.
3. In call e - 2 this rank cleared slot (e - 3) % 3 = e % 3, which it had read in call e - 3.
4. So the clears had reached this GPU's L2 cache before the data of line 2 left, and the peer's stores come to the same
   cache later. (That is the hardware. PTX's memory model would want a release in line 2 and an acquire in line 1.)

With two slots this rank would be clearing one while the peer writes to it.

Larger tensors are `iris.ccl.two_shot_push`'s, which sends less, in two steps.
"""

import functools
from typing import Any

import torch
import triton.language as tl

from iris.ccl.call import Algorithm, Call
from iris.ccl.combine import accumulate, accumulator, finalize
from iris.ccl.communicator import Launch
from iris.ccl.kernel_arguments import LamportChannel
from iris.ccl.kernel_launch import INTEGERS, fitting, kernel_launch
from iris.ccl.lamport_channel import MOST_WARPS, SLOTS, WARP_BYTES, call_channel, fits
from iris.language.address import translate
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_launch_dependents, gdc_wait
from iris.language.flat import flat
from iris.language.jit import jit
from iris.language.lamport import decode, elements_per_word, lamport_clear, lamport_recv, lamport_send
from iris.language.ordering import store_after_sync
from iris.language.pairs import rounded_by_pairs
from iris.language.target import on_nvidia

# Blocks that a program sends before it waits for the first of them, so that the links are busy while it
# adds up. If it sent all of them first, the links would be idle at the end.
AHEAD = tl.constexpr(1)


@jit
def recv_and_reduce(ctx, parts, own, count, W: tl.constexpr, PART: tl.constexpr, OP: tl.constexpr, factors=None):
    """Wait for the first ``count`` elements of every rank's part, and combine them in the order of ranks.

    ``parts``: where part 0 is received; part s is ``s * PART`` elements after it. ``own``: the caller's own part, a
    block whose length is the next power of two from ``PART`` on. ``factors``: see `iris.ccl.combine.scaled`.
    """
    rank = ctx.cur_rank
    element: tl.constexpr = own.dtype
    ACC: tl.constexpr = accumulator(element)
    E: tl.constexpr = elements_per_word(element)
    own = tl.cast(own, ACC)
    if W == 2:
        # All is from one rank, so there is no part to leave out.
        (words,) = lamport_recv(
            parts + (1 - rank) * PART,
            -1,
            count,
            WORDS=own.shape[0] // E,
            PARTS=1,
            STRIDE=PART // E,
            element=element,
            record=ctx._record(),
            source=1 - rank,
        )
        other = tl.cast(decode(words, own, element), ACC)
        if (OP == "sum" or OP == "avg") and ACC == tl.float32 and on_nvidia():
            # The same bits in either order: of NaNs, too, an addition of float32 makes one and the same there (CUDA C++
            # Programming Guide, "Floating-Point Standard").
            total = own + other
        else:
            total = accumulate(own, tl.where(rank == 0, own, other), factors, 0, OP=OP)
            total = accumulate(total, tl.where(rank == 0, other, own), factors, 1, OP=OP)
    else:
        words = lamport_recv(
            parts,
            rank,
            count,
            WORDS=own.shape[0] // E,
            PARTS=W,
            STRIDE=PART // E,
            element=element,
            record=ctx._record(),
        )
        total = own
        for s in tl.static_range(W):
            value = tl.where(rank == s, own, tl.cast(decode(words[s], own, element), ACC))
            total = accumulate(total, value, factors, s, OP=OP)
    if not (ACC == tl.float32 and on_nvidia()):
        # All NaNs become one. Of two, an addition passes on the bits of the first, and between two ranks LLVM takes the
        # choices above for "own and other": another first on each rank. And the own output has the total itself, while
        # to others a NaN of all ones travels as another. Float32 on NVIDIA has one NaN anyway.
        total = tl.where(total == total, total, float("nan"))
    return rounded_by_pairs(finalize(total, element, W, OP))


@jit
def peers(ctx, W: tl.constexpr):
    """Where the workspaces of the other ranks begin: the next rank's first, and so on around the ring."""
    bases = ()
    for distance in tl.static_range(1, W):
        bases += (tl.load(ctx.table + (ctx.cur_rank + distance) % W),)
    return bases


@jit
def push(ctx, ptr, i, values, count, bases, distance: tl.constexpr, W: tl.constexpr):
    """Send the first ``count`` elements of ``values`` to rank ``cur_rank + distance``, into its copy of ``ptr``.

    ``bases``: those of `peers`. ``i``: the indices of the elements, for tracing.
    """
    event = ctx.tracing.begin_move("store", ptr + i, (ctx.cur_rank + distance) % W, i < count)
    lamport_send(translate(ptr, ctx.base, bases[distance - 1]), values, count)
    ctx.tracing.record_event_end(event)


@jit
def region(slots, max_blocks, block, epoch, REGION: tl.constexpr):
    """The region of a block in the slot of an epoch. In a slot, the regions of all blocks are contiguous."""
    return slots + (tl.cast(epoch % SLOTS, tl.int64) * max_blocks + block) * REGION


@jit
def recycle_slot(ctx, channel, block, epoch, W: tl.constexpr, PART: tl.constexpr, STEPS: tl.constexpr):
    """Clear what peers have put into the slot of the epoch before, and store the block's next epoch, modulo 3."""
    old = region(channel.slots, channel.max_blocks, block, epoch + (SLOTS - 1), REGION=STEPS * W * PART)
    i = flat(PART, channel.slots.dtype.element_ty)
    for step in tl.static_range(STEPS):
        for distance in tl.static_range(1, W):
            part = step * W + (ctx.cur_rank + distance) % W
            lamport_clear(old + part * PART + i, i < PART)
    store_after_sync(channel.epochs + block, (epoch + 1) % SLOTS)


@jit
def send_block(
    ctx, channel, input, block, bases, n, send_step, W: tl.constexpr, PART: tl.constexpr, SAME: tl.constexpr
):
    """The first step of a block: push it to every other rank."""
    rank = ctx.cur_rank
    i = flat(PART, input.dtype.element_ty)
    k = block * PART + i
    slot = region(channel.slots, channel.max_blocks, block, tl.load(channel.epochs + block), REGION=W * PART)
    # All loads first: the compiler must assume that the stores change what a later load reads.
    parts = ()
    for distance in tl.static_range(1, W):
        to = tl.cast((rank + distance) % W, tl.int64)
        if SAME and distance > 1:
            parts += (parts[0],)
        else:
            parts += (tl.load(input + to * send_step + k, mask=k < n),)
    for distance in tl.static_range(1, W):
        values = parts[distance - 1]
        push(ctx, slot + rank * PART, i, values, count=n - block * PART, bases=bases, distance=distance, W=W)


@jit
def reduce_block(
    ctx,
    channel,
    input,
    output,
    block,
    factors,
    n,
    send_step,
    W: tl.constexpr,
    PART: tl.constexpr,
    OP: tl.constexpr,
):
    """The second step of a block: wait for it from every other rank, and add them up."""
    rank = ctx.cur_rank
    k = block * PART + flat(PART, input.dtype.element_ty)
    epoch = tl.load(channel.epochs + block)
    own = tl.load(input + tl.cast(rank, tl.int64) * send_step + k, mask=k < n)
    # While the data are under way.
    recycle_slot(ctx, channel, block, epoch, W=W, PART=PART, STEPS=1)
    received = region(channel.slots, channel.max_blocks, block, epoch, REGION=W * PART)
    event = ctx.tracing.begin_wait_for_data(received, rank)
    total = recv_and_reduce(ctx, received, own, n - block * PART, W=W, PART=PART, OP=OP, factors=factors)
    ctx.tracing.record_event_end(event)
    tl.store(output + k, total, mask=k < n)


@jit
def one_shot(
    channel,
    input,
    output,
    factors,
    n,
    send_step,
    W: tl.constexpr,
    PART: tl.constexpr,
    OP: tl.constexpr,
    SAME: tl.constexpr,
    ONE_EACH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The kernel. ``n``: elements, not bytes, of the output. ``PART``: elements of a block.

    ``send_step``: elements from what one rank gets of the input to what the next rank gets; 0 in all_reduce, where all
    get the ``SAME``. ``factors``: of PREMUL_SUM, one for each rank; else None. ``ONE_EACH``: every program has one
    block. ``EARLY``: let the next kernel of the stream begin early (`gdc_launch_dependents`).
    """
    ctx = DeviceContext.initialize(channel.context, num_ranks=W)
    bases = peers(ctx, W)
    gdc_wait()
    if EARLY:
        gdc_launch_dependents()
    first = tl.program_id(0)
    if ONE_EACH:
        send_block(ctx, channel, input, first, bases=bases, n=n, send_step=send_step, W=W, PART=PART, SAME=SAME)
        reduce_block(
            ctx, channel, input, output, block=first, factors=factors, n=n, send_step=send_step, W=W, PART=PART, OP=OP
        )
    else:
        stride = tl.num_programs(0)
        rounds = ((n + PART - 1) // PART - first + stride - 1) // stride
        for round in range(0, rounds + AHEAD):
            if round < rounds:
                block = first + round * stride
                send_block(ctx, channel, input, block, bases=bases, n=n, send_step=send_step, W=W, PART=PART, SAME=SAME)
            if round >= AHEAD:
                block = first + (round - AHEAD) * stride
                reduce_block(
                    ctx,
                    channel,
                    input,
                    output,
                    block=block,
                    factors=factors,
                    n=n,
                    send_step=send_step,
                    W=W,
                    PART=PART,
                    OP=OP,
                )


def launch_one_shot(call: Call, max_programs: int | None) -> Launch:
    """A launch of all_reduce or reduce_scatter in one step, of at most ``max_programs`` programs."""
    same = call.collective == "all_reduce"
    shared = launch_arguments(call, max_programs, steps=1)
    one_each = shared["programs"] * shared["PART"] >= shared["n"]
    step = 0 if same else call.send_step
    return kernel_launch(call, one_shot, **shared, send_step=step, SAME=same, ONE_EACH=one_each)


def launch_arguments(call: Call, max_programs: int | None, steps: int) -> dict[str, Any]:
    """Programs, warps, and the arguments that this kernel and `iris.ccl.two_shot_push` have."""
    comm, (dtype, _, op) = call.comm, call.elements
    n = call.elements.number_in(call.output)
    max_programs = max_programs or 2 * comm.num_sms
    name, layout = call_channel(call, max_programs, steps)
    channel = comm.workspace.channel(name, call.line, layout.nbytes, layout.epochs)
    part = layout.part // dtype.itemsize
    blocks = -(-n // (part if steps == 1 else part * comm.size))
    # No more warps than there is data for. On AMD all warps of a program poll until the last one has its data.
    warps = min(call.config.warps(part, dtype.itemsize), max(1, layout.part // WARP_BYTES), MOST_WARPS)
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
        PART=part,
        OP=op,
    )


# Dtypes whose elements can be their own flags: all ones are a NaN (`iris.language.lamport`).
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2
LAMPORT = frozenset(FLOATS)
LIMITS = "is for floating-point tensors, whose elements can be their own flags"

ALGORITHMS = (
    Algorithm(
        "one_shot",
        ("all_reduce", "reduce_scatter"),
        launch_one_shot,
        dtypes=LAMPORT,
        min_ranks=2,
        fits=functools.partial(fits, steps=1),
        limits=LIMITS,
    ),
)
