"""All-reduce by accumulators that everybody adds to: with atomics, or with a lock around plain loads and stores.

The shortest all-reduces there are, but slow, and not the same bits in every run: ranks add in the order in which they
come. Every rank adds its block to an accumulator at every rank, the ranks meet, and each reads its own accumulator,
rounds it and clears it for later. Over the link: W - 1 times the bytes of the accumulator's type, in one step; under a
lock a block is fetched too, so twice that, and blocks of different ranks wait for each other.

Each program has two accumulators, used in turn by the parity of its barrier's epoch. Why that is enough: a peer adds to
the one of epoch e again in epoch e + 2, after the barrier of e + 1, at which I arrived after having read and cleared
the one of e. The barrier's release covers the adds, though these are relaxed and of other threads of the block: it is
after a block barrier, and a release is cumulative (PTX ISA, "Memory Consistency Model: Causality order").

A call clears as much as it used, so between calls all is zero, whatever their sizes.
"""

import dataclasses
import functools

import torch
import triton.language as tl

from iris.ccl.call import Algorithm, Call
from iris.ccl.combine import finalize, scaled
from iris.ccl.communicator import Launch, power_of_two
from iris.ccl.kernel_launch import kernel_launch
from iris.ccl.queue import blocks_of
from iris.ccl.reduction import accumulator_dtype
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.flat import flat
from iris.language.jit import jit
from iris.language.ordering import RELAXED, SYS, lock, unlock

# Bytes of an accumulator: what 512 threads hold in four registers each.
ACCUMULATOR_BYTES = 8192
# A program's lock has a line of its own.
LOCK_BYTES = 128


def channel_bytes(size: int, programs: int) -> int:
    """Bytes of the accumulators, locks and barrier flags of so many programs among ``size`` ranks."""
    return programs * (2 * ACCUMULATOR_BYTES + LOCK_BYTES + 4 * size)


@jit
def atomic(
    context_tensor,
    flags,
    locks,
    accumulators,
    input,
    output,
    factors,
    n,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
    OP: tl.constexpr,
    LOCKED: tl.constexpr,
):
    """``accumulators``: ``[programs, 2, SLOT]``, of which ``BLOCK`` are used. ``locks``: ``[programs, 32]``."""
    gdc_wait()
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    rank = ctx.cur_rank
    p = tl.program_id(0)
    element: tl.constexpr = input.dtype.element_ty
    ACC: tl.constexpr = accumulators.dtype.element_ty
    own_lock = locks + p * 32
    # The column of a rank in its own flags is the epoch that it has reached.
    epoch = tl.load(flags + p * W + rank)
    i = flat(BLOCK, element)
    for block in range(p, blocks_of(n, BLOCK), tl.num_programs(0)):
        k = tl.cast(block, tl.int64) * BLOCK + i
        value = scaled(tl.cast(tl.load(input + k, mask=k < n), ACC), factors, rank, OP)
        mine = accumulators + (p * 2 + (epoch & 1)) * SLOT + i
        for distance in range(0, W):
            to = (rank + distance) % W
            if LOCKED:
                there, its_lock = ctx.translate(mine, to), ctx.translate(own_lock, to)
                lock(its_lock, ctx._record())
                tl.store(there, tl.load(there, mask=k < n) + value, mask=k < n)
                unlock(its_lock)
            else:
                ctx.atomic_add(mine, value, to, mask=k < n, sem=RELAXED, scope=SYS)
        epoch += 1
        ctx.barrier(flags, epoch)
        total = tl.load(mine, mask=k < n)
        tl.store(output + k, finalize(total, element, W, OP), mask=k < n)
        tl.store(mine, tl.zeros_like(total), mask=k < n)


def launch(call: Call, max_programs: int | None, locked: bool) -> Launch:
    """A launch of all_reduce, of at most ``max_programs`` programs."""
    comm, config, (dtype, _, op) = call.comm, call.config, call.elements
    n = call.elements.number_in(call.input)
    # Of what hardware adds atomically; integers wrap in the wider type as in their own.
    sums = accumulator_dtype(dtype)
    sums = torch.int32 if sums.itemsize < 4 else sums
    block = config.elements_per_block(sums.itemsize, ACCUMULATOR_BYTES)
    programs = min(comm.programs(max_programs), -(-n // block))
    # Calls of similar size share a channel: accumulators, locks, and flags after them.
    room = power_of_two(programs)
    locks = room * 2 * ACCUMULATOR_BYTES
    flags = locks + room * LOCK_BYTES
    size = channel_bytes(comm.size, room)
    channel = comm.workspace.channel(
        f"accumulators of {room} programs of all_reduce", call.line, size, slice(flags, size)
    )
    return kernel_launch(
        call,
        atomic,
        programs=programs,
        num_warps=config.warps(block, sums.itemsize),
        dtype=dtype,
        context_tensor=channel.context_tensor,
        flags=channel.memory[flags:].view(torch.int32),
        locks=channel.memory[locks:flags].view(torch.int32),
        accumulators=channel.memory[:locks].view(sums),
        n=n,
        W=comm.size,
        BLOCK=block,
        SLOT=ACCUMULATOR_BYTES // sums.itemsize,
        OP=op,
        LOCKED=locked,
    )


ADDS = Algorithm(
    "atomic",
    ("all_reduce",),
    functools.partial(launch, locked=False),
    ops=frozenset({"sum", "avg", "premul_sum"}),
    on_request=True,
    in_rank_order=False,
    limits="adds: it is for SUM and AVG of numbers",
)
ALGORITHMS = (ADDS, dataclasses.replace(ADDS, name="spinlock", launch=functools.partial(launch, locked=True)))
