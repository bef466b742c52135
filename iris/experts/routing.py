"""Which tokens a program serves, and where the experts of a token are: what dispatch and combine share."""

import triton
import triton.language as tl

from iris.language.barrier import lanes

# What a launch does: all of a call; or one of its halves, first what sends, then what receives.
WHOLE, SEND, RECEIVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def number_of_program(PHASE: tl.constexpr, EXTENTS: tl.constexpr):
    """This program's number in the whole call: first come those that send, then those that receive."""
    program = tl.program_id(0)
    if PHASE == RECEIVE:
        program += EXTENTS.PROGRAMS
    return program


@triton.jit
def tokens_of(tokens, num_tokens):
    """How many of ``tokens`` there are: all, or as many as ``num_tokens`` says, where that is not None."""
    if num_tokens is not None:
        tokens = tl.maximum(tl.minimum(tl.load(num_tokens), tokens), 0)
    return tokens


@triton.jit
def chunk_of(tokens, program, EXTENTS: tl.constexpr):
    """The tokens of this program among so many of a rank, [first, last): equal shares, in order.

    Where there are fewer than programs, the first of these have one each.
    """
    each, more = tokens // EXTENTS.PROGRAMS, tokens % EXTENTS.PROGRAMS
    first = program * each + tl.minimum(program, more)
    return first, first + each + tl.where(program < more, 1, 0)


@triton.jit
def of_rank(numbers, rank, EXTENTS: tl.constexpr):
    """The element of ``numbers``, which has one for each rank, that is this rank's."""
    return tl.sum(tl.where(tl.arange(0, EXTENTS.RANKS) == rank, numbers, 0), axis=0)


@triton.jit
def tokens_of_step(tokens, source, step, program, SIZE: tl.constexpr, EXTENTS: tl.constexpr):
    """The tokens of rank ``source`` that a program serves in a step of ``SIZE`` of them, [first, last).

    ``tokens``: how many each rank has.
    """
    first, last = chunk_of(of_rank(tokens, source, EXTENTS), program, EXTENTS)
    first += step * SIZE
    return first, tl.minimum(first + SIZE, last)


@triton.jit
def steps_of(first, last, STEP: tl.constexpr):
    """How many steps of ``STEP`` tokens the tokens [first, last) take."""
    return (last - first + STEP - 1) // STEP


@triton.jit
def choices(EXTENTS: tl.constexpr):
    """The indices of a token's choices, from 0 up to the next power of two of K: the last ones may be no choices."""
    return tl.arange(0, EXTENTS.CHOICES)


@triton.jit
def load_experts(ids, mask, EXTENTS: tl.constexpr):
    """Numbers of experts, int32; -1 for what is none."""
    experts = tl.load(ids, mask=mask, other=-1)
    return tl.where((experts >= 0) & (experts < EXTENTS.E), experts, -1).to(tl.int32)


@triton.jit
def load_choices(ids, token, there, EXTENTS: tl.constexpr):
    """The experts of tokens of ``[tokens, K]``, a row each; -1 for none, and for tokens that are not ``there``."""
    k = choices(EXTENTS)
    at = tl.cast(token, tl.int64)[:, None] * EXTENTS.K + k[None, :]
    return load_experts(ids + at, there[:, None] & (k < EXTENTS.K)[None, :], EXTENTS)


@triton.jit
def owners(experts, EXTENTS: tl.constexpr):
    """The ranks of these experts, -1 for none."""
    return tl.where(experts >= 0, experts // EXTENTS.LOCAL, -1)


@triton.jit
def owner_bits(experts, EXTENTS: tl.constexpr):
    """Of each row of ``experts`` a bit for each rank that has one of them, int32."""
    owner = owners(experts, EXTENTS)
    bits = tl.max((owner == 0).to(tl.int32), axis=1)
    for peer in range(1, EXTENTS.W):
        bits |= tl.max((owner == peer).to(tl.int32), axis=1) << peer
    return bits


@triton.jit
def has_bit(bits, rank):
    return ((bits >> rank) & 1) > 0


@triton.jit
def any_is(values, wanted):
    """Whether one of the values is this one."""
    return tl.max((values == wanted).to(tl.int32), axis=0) > 0


@triton.jit
def signal_all(ctx, flag, value):
    """Set the copies of a flag on all ranks, after what this program has stored there."""
    peers = lanes()
    ctx._signal_ranks(flag, value + 0 * peers, peers, here=peers < ctx.num_ranks)


@triton.jit
def signal_others(ctx, flag, value):
    """Set the copies of a flag on all other ranks, after what this program has stored there."""
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
