"""Large all_reduce of floating-point types: pushed, with sums that go straight to results.

W is the number of ranks. A block has W parts of PART elements, and every rank adds up one of them. Of each block:

1. A program pushes part d to rank d, for all other ranks d, into the block's *slot* there. Each element is its own
   flag, as in `iris.ccl.one_shot`.
2. It waits for its own part from all others, adds up in the order of ranks, and stores the sum: to its own output, and
   to those of all others, where they lie.
3. Where its output is not on the symmetric heap, nor in another region (`iris.ccl.queue`), the others push their sums
   into its slots, and it takes them from there.

A program does step 1 for all of its blocks first, so the link is busy from the first block to the last sum. Then it
does step 2 of a block and step 3 of the one before by turns. No program waits for ever: sums of a block are sent before
their sender waits for those of the block before.

2 (W - 1) / W times the bytes leave a rank, all of it stored. `iris.ccl.pull` loads half of it, which is
slower over NVLink, and does not begin before it knows where inputs are. Here a rank tells the others where its output
is while parts are under way. `iris.ccl.two_shot_push` is the same without step 2's way to the results: its step 3 moves
no bytes over the link, and grows with the tensor. But it ends without a barrier, which decides where tensors are small.

For example, 64 MiB of bf16 between 2 H200: 128 programs of 8 warps, parts of 16 KiB, so 2048 blocks, 16 for each.

Why a slot may be used again: its reader clears it when all threads of the program have what they read. They await whole
vectors of 16 bytes, so nothing of this call comes later. At the end program p of each rank signals this with release to
program p of all others, and waits for theirs with acquire (`exit_barrier`). The next call on these slots is a kernel
that runs after this one, so after all of its programs.

Why results are there: the same signal comes after the stores to them. And they may be written, since the receiver has
said where they are in a kernel that runs after everything earlier on its stream (`permit`).

Why the output may be the input: rank d writes element e of this rank's output only if this rank adds it up with the
others, from what this rank has sent of its element e. So that store depends on the load of the element that it writes
over, through data alone: a chain of dependencies, which may not feed itself (PTX ISA, "No-Thin-Air Axiom").

Sums are formed by one rank each, in the order of ranks, so all ranks have the same bits.
"""

from typing import NamedTuple

import triton.language as tl

from iris.ccl.call import Algorithm, Call
from iris.ccl.communicator import Communicator, Launch, power_of_two
from iris.ccl.kernel_launch import kernel_launch
from iris.ccl.lamport_channel import MOST_WARPS, SHARE_WITH_ROOM, WARP_BYTES, admits
from iris.ccl.one_shot import LAMPORT, LIMITS, peers, push, recv_and_reduce
from iris.ccl.queue import (
    COUNTS,
    EXITS,
    OUTPUTS,
    WORDS,
    among,
    blocks_of,
    exit_barrier,
    lane_value,
    permit,
    pointer_at,
    region_bytes,
    resolve_places,
    store_to_peer,
)
from iris.ccl.two_shot_push import as_received, push_parts, recv_sums
from iris.language.barrier import lanes
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.fences import block_barrier
from iris.language.flat import flat
from iris.language.jit import jit
from iris.language.lamport import elements_per_word, lamport_clear, words_per_vector
from iris.language.ordering import signed_type
from iris.language.target import threads_per_warp

# Bytes that a program receives for a block at most: the parts of all W ranks.
BLOCK_BYTES = 32768
# Rounds between a sum that a program sends and those of the same block that it takes from slots.
AHEAD = tl.constexpr(1)


@jit
def slot_at(slots, block, W: tl.constexpr, PART: tl.constexpr):
    """The slot of a block: parts, and sums, ``[2, W sources, PART]``."""
    return slots + tl.cast(block, tl.int64) * (2 * W * PART)


@jit
def whole_vectors(count, element: tl.constexpr):
    """``count`` elements, and what else is sent in the last vector of 16 bytes (`lamport_send`)."""
    VECTOR: tl.constexpr = elements_per_word(element) * words_per_vector(element)
    return (count + VECTOR - 1) // VECTOR * VECTOR


@jit
def clear(ctx, parts, W: tl.constexpr, PART: tl.constexpr):
    """Clear what all other ranks have sent to ``parts``, when all threads have what they read of it."""
    # A thread may clear what another one polls.
    block_barrier()
    i = flat(PART, parts.dtype.element_ty)
    for distance in tl.static_range(1, W):
        lamport_clear(parts + (ctx.cur_rank + distance) % W * PART + i, i < PART)


@jit
def two_shot_direct(
    queues,
    input,
    output,
    factors,
    n,
    length,
    W: tl.constexpr,
    RANKS: tl.constexpr,
    PART: tl.constexpr,
    OP: tl.constexpr,
):
    """``queues``: a `QueueMemory` whose slots are those of all blocks. ``length``: bytes of the output.

    The rest is as for `iris.ccl.two_shot_push`.
    """
    gdc_wait()
    ctx = DeviceContext.initialize(queues.context, num_ranks=W)
    rank, bases = ctx.cur_rank, peers(ctx, W)
    element: tl.constexpr = input.dtype.element_ty
    # Messages are integers, and sums are not.
    slots = tl.cast(queues.slots, tl.pointer_type(signed_type(element)), bitcast=True)
    p, programs = tl.program_id(0), tl.num_programs(0)
    row, words = queues.counts + p * COUNTS, queues.words + p * WORDS + OUTPUTS
    others = among(0, W, rank)
    calls = tl.load(row + EXITS + rank) + 1
    direct_here = permit(ctx, queues, words, output, length=length, calls=calls + lanes() * 0, ranks=others, W=W)
    blocks = blocks_of(n, W * PART)

    for block in range(p, blocks, programs):
        push_parts(ctx, slot_at(slots, block, W=W, PART=PART), input, block, n=n, bases=bases, W=W, PART=PART)

    # Of this call: what a word said before was read in the last call, and a place is sent in every one.
    addresses = resolve_places(ctx, queues, words, calls, others=others, W=W, ACQUIRES=False)
    direct, outputs = (), ()
    for distance in tl.static_range(1, W):
        address = lane_value(addresses, (rank + distance) % W)
        direct += (address != 0,)
        outputs += (pointer_at(queues.slots, address),)
    i = flat(PART, element)
    rounds = (blocks - p + programs - 1) // programs
    for round in range(0, rounds + AHEAD):
        if round < rounds:
            block = p + round * programs
            slot = slot_at(slots, block, W=W, PART=PART)
            k = (block * W + rank) * PART + i
            own, count = tl.load(input + k, mask=k < n), n - (block * W + rank) * PART
            event = ctx.tracing.begin_wait_for_data(slot, rank)
            expected = whole_vectors(count, element)
            total = recv_and_reduce(ctx, slot, own, expected, W=W, PART=PART, OP=OP, factors=factors)
            ctx.tracing.record_event_end(event)
            clear(ctx, slot, W=W, PART=PART)
            result = as_received(total)
            tl.store(output + k, result, mask=k < n)
            for distance in tl.static_range(1, W):
                if direct[distance - 1]:
                    store_to_peer(ctx, outputs[distance - 1] + k, result, (rank + distance) % W, mask=k < n)
                else:
                    sums = slot + (W + rank) * PART
                    push(ctx, sums, i, total, count=count, bases=bases, distance=distance, W=W)
        if (round >= AHEAD) & (direct_here == 0):
            block = p + (round - AHEAD) * programs
            sums = slot_at(slots, block, W=W, PART=PART) + W * PART
            count = tl.minimum(n - block * W * PART, W * PART)
            expected = whole_vectors(count, element)
            recv_sums(ctx, sums, output, block * W * PART, count=count, expected=expected, W=W, RANKS=RANKS, PART=PART)
            clear(ctx, sums, W=W, PART=PART)
    exit_barrier(ctx, row, calls, others, W=W)


class Slots(NamedTuple):
    """Those of a call, and of others of similar size. ``part``: bytes of a part. ``nbytes``: of all of them."""

    programs: int
    part: int
    blocks: int
    nbytes: int

    @property
    def name(self) -> str:
        """Of the memory in `iris.runtime.workspace`."""
        return (
            f"counts of {power_of_two(self.programs)} programs, and slots of {self.blocks} blocks in parts of "
            f"{self.part} bytes, for all_reduce"
        )


def slots_of(comm: Communicator, nbytes: int, max_programs: int | None) -> Slots:
    """For a tensor of ``nbytes``, of at most ``max_programs`` programs."""
    programs, size = comm.programs(max_programs), comm.size
    # At least 16 bytes for each thread of a warp: no two threads may poll the same word (`lamport_recv`).
    smallest = max(WARP_BYTES, 16 * threads_per_warp())
    part = max(smallest, BLOCK_BYTES // power_of_two(size))
    while part > smallest and programs * part * size > nbytes:
        part //= 2
    blocks = max(1, -(-nbytes // (part * size)))
    rounded = power_of_two(blocks)
    return Slots(min(programs, blocks), part, rounded, 2 * rounded * size * part)


def needed(comm: Communicator, slots: Slots) -> int:
    """Bytes of the slots, and of what programs tell each other."""
    return slots.nbytes + region_bytes(power_of_two(slots.programs), comm.size, 0)


def fits(comm: Communicator, collective: str, nbytes: int) -> bool:
    """Whether a call does not take more than its share of the group's memory."""
    return needed(comm, slots_of(comm, nbytes, None)) <= comm.workspace.limit // SHARE_WITH_ROOM


def has_room(call: Call, max_programs: int | None) -> bool:
    """Whether there is memory for a call that `fits`. The first call of each channel decides for those that follow."""
    slots = slots_of(call.comm, call.table_bytes, max_programs)
    return admits(call, slots.name, needed(call.comm, slots))


def launch(call: Call, max_programs: int | None) -> Launch:
    """A launch of all_reduce, of at most ``max_programs`` programs."""
    comm, (dtype, _, op) = call.comm, call.elements
    slots = slots_of(comm, call.table_bytes, max_programs)
    part = slots.part // dtype.itemsize
    return kernel_launch(
        call,
        two_shot_direct,
        programs=slots.programs,
        num_warps=min(call.config.warps(part, dtype.itemsize), max(1, slots.part // WARP_BYTES), MOST_WARPS),
        dtype=dtype,
        queues=comm.program_memory(slots.name, call.line, slots.programs, slots.nbytes).memory(dtype, comm),
        n=call.elements.number_in(call.output),
        length=call.output.nbytes,
        W=comm.size,
        RANKS=power_of_two(comm.size),
        PART=part,
        OP=op,
    )


ALGORITHMS = (
    Algorithm(
        "two_shot_direct",
        ("all_reduce",),
        launch,
        dtypes=LAMPORT,
        min_ranks=2,
        fits=fits,
        has_room=has_room,
        limits=LIMITS,
    ),
)
