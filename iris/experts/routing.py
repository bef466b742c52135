"""Which tokens a program serves, and where the experts of a token are: what dispatch and combine share."""

import triton
import triton.language as tl

from iris.language.barrier import lanes


@triton.jit
def chunk_of(tokens, program):
    """The tokens of this program among so many of a rank, [first, last): equal shares, in order.

    Where there are fewer than programs, the first of these have one each.
    """
    each, more = tokens // tl.num_programs(0), tokens % tl.num_programs(0)
    first = program * each + tl.minimum(program, more)
    return first, first + each + tl.where(program < more, 1, 0)


@triton.jit
def choices(EXTENTS: tl.constexpr):
    """The numbers of a token's choices, and behind them up to a power of two."""
    return tl.arange(0, EXTENTS.CHOICES)


@triton.jit
def load_experts(ids, mask, EXTENTS: tl.constexpr):
    """Numbers of experts, int32; -1 for what is none."""
    experts = tl.load(ids, mask=mask, other=-1)
    return tl.where((experts >= 0) & (experts < EXTENTS.E), experts, -1).to(tl.int32)


@triton.jit
def load_choices(ids, token, EXTENTS: tl.constexpr):
    """The experts of a token of ``[tokens, K]``; -1 for none."""
    k = choices(EXTENTS)
    return load_experts(ids + tl.cast(token, tl.int64) * EXTENTS.K + k, k < EXTENTS.K, EXTENTS)


@triton.jit
def owners(experts, EXTENTS: tl.constexpr):
    """The ranks of these experts, -1 for none."""
    return tl.where(experts >= 0, experts // EXTENTS.LOCAL, -1)


@triton.jit
def any_is(values, wanted):
    """Whether one of the values is this one."""
    return tl.max((values == wanted).to(tl.int32), axis=0) > 0


@triton.jit
def signal_others(ctx, flag, value):
    """Set the copies of a flag of all other ranks, behind what this program has stored there."""
    peers = lanes()
    ctx._signal_ranks(flag, value + 0 * peers, peers, here=(peers < ctx.num_ranks) & (peers != ctx.cur_rank))


@triton.jit
def wait_others(ctx, flags, value):
    """Wait until a flag of each other rank, an element each, has reached the value."""
    peers = lanes()
    ctx._wait_ranks(
        flag_ptrs=flags,
        wanted=value + 0 * peers,
        here=(peers < ctx.num_ranks) & (peers != ctx.cur_rank),
        first=0,
        num_ranks=ctx.num_ranks,
    )
