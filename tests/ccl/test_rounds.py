"""Many calls, one after the other and with no meeting of the hosts between them, on ranks that are early or late.

Every round has other data, so what is left of an earlier one shows. Sizes, dtypes, grids, variants, roots, places and
the collectives themselves change from call to call; ranks sleep now and then, each at other times.
"""

import itertools
import random
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from covering import UNDER_TORCHRUN, thorough
from hesitation import hesitant

from ccl.calls import EVERYTHING, LAYOUTS, MOVES, ON_THE_HEAP, PLACES, SUMS, Arena, Case, chosen, mainly, perform
from iris.ccl import Config, ReduceOp, one_hop
from iris.ccl.communicator import P2P_SETS
from iris.ccl.pull import IN_FLIGHT
from iris.ccl.queue import COUNTS, DONE, MAX_RANKS, POSTS, WORDS
from iris.ccl.queue import PLACES as PLACES_FROM

ARENA_BYTES = 24 << 20
ROUNDS = 600 if EVERYTHING else 40 if UNDER_TORCHRUN else 20

CONFIGS = [
    (),
    (("comm_sms", 1),),
    (("comm_sms", 3),),
    (("use_gluon", True),),
    (("block_size_m", 4), ("block_size_n", 512)),
    (("num_warps", 2), ("comm_sms", 5)),
    (("all_reduce_variant", "ring"), ("comm_sms", 3)),
]
VARIANTS = {
    "ring": [
        (("all_reduce_variant", "ring"), ("comm_sms", sms), ("all_reduce_ring_slice_n", slice_n))
        for sms, slice_n in ((1, 128), (2, None), (7, 1024))
    ],
    **{name: [(("all_reduce_variant", name), ("comm_sms", sms)) for sms in (1, 4)] for name in ("atomic", "spinlock")},
}
SIZES = [0, 1, 5, 300, 2048, 9001]
LARGE = [20_000, 40_000]  # beyond 64 KiB, one call in ten
DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.int32, torch.float64]


def rounds_of(ranks, rounds):
    """Of many, more than three ranks play fewer, as they share the cores."""
    return rounds * 3 // max(3, ranks.num_ranks) if EVERYTHING else rounds


def choose(generator, collectives, configs=CONFIGS):
    """Any case; the same on all ranks, for equal generators."""
    pick = generator.choice
    collective = pick(collectives)
    size = pick(LARGE) if generator.random() < 0.1 else pick(SIZES)
    config = pick(configs)
    if collective == "all_to_all_v" and ("use_gluon", True) in config:
        config = ()
    op = pick([ReduceOp.SUM, ReduceOp.MAX])
    if {value for _, value in config} & {"atomic", "spinlock"}:
        op = ReduceOp.SUM
    return Case(
        collective, (size,), pick(DTYPES), op, generator.randrange(8),
        pick(PLACES), pick(PLACES), pick(LAYOUTS), config=config,
    )  # fmt: skip


def dawdle(ctx, generator):
    """Be late now and then: the host, and what it has enqueued."""
    if generator.random() < 0.2:
        time.sleep(generator.choice([0.0005, 0.002, 0.01]))
    if ctx.device.type == "cuda" and generator.random() < 0.2:
        torch.cuda._sleep(generator.randrange(1_000_000))


def sequence(ctx, collectives, seed, rounds, configs=CONFIGS):
    arena = Arena(ctx.empty(ARENA_BYTES, dtype=torch.uint8))
    common, own = random.Random(seed), random.Random(f"{seed} {ctx.cur_rank}")
    with hesitant(ctx, own):
        for call in range(rounds):
            case = choose(common, collectives, configs)
            dawdle(ctx, own)
            perform(ctx, arena, case, call)


@mainly(3)
@pytest.mark.parametrize("collective", [*MOVES, *SUMS])
def test_rounds_of_one_collective(ranks, collective):
    ranks.run(sequence, [collective], collective, rounds_of(ranks, ROUNDS // 4))


@mainly(3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_rounds_of_a_variant(ranks, variant):
    ranks.run(sequence, ["all_reduce"], variant, rounds_of(ranks, ROUNDS // 2), VARIANTS[variant])


def sequence_by(ctx, variant, seed, rounds, in_flight=IN_FLIGHT):
    collectives = ["all_reduce", "reduce_scatter", "broadcast"] if variant == "pull" else ["all_reduce"]
    with patch("iris.ccl.pull.IN_FLIGHT", in_flight), chosen(ctx, variant):
        sequence(ctx, collectives, seed, rounds)


@mainly(3)
@pytest.mark.parametrize(("variant", "in_flight"), ON_THE_HEAP.values(), ids=ON_THE_HEAP)
def test_rounds_of_tensors_that_peers_access_where_they_lie(ranks, variant, in_flight):
    ranks.run(sequence_by, variant, variant, rounds_of(ranks, ROUNDS // 2), in_flight)


@mainly(2, 4)
def test_rounds_of_all_collectives(ranks):
    ranks.run(sequence, [*MOVES, *SUMS], "mixed", 2 * ROUNDS // ranks.num_ranks)


def run_ahead(ctx, collective, rounds):
    """One rank is late, and has to find every call's data although the others are at later ones already."""
    size, rank, late = ctx.num_ranks, ctx.cur_rank, ctx.num_ranks - 1
    ctx.ccl.communicator()  # Who has no part in a message must come to the first call.
    for first in (0, late):
        root = late if collective == "gather" else first
        given, result = ctx.zeros(rounds, size, 50), ctx.zeros(rounds, size, 50)
        given.copy_(torch.arange(given.numel()).view(given.shape) + 1e6 * rank)
        everyone = [given + 1e6 * (peer - rank) for peer in range(size)]
        if rank == late and size > 1:
            time.sleep(0.2)
            if ctx.device.type == "cuda":
                torch.cuda._sleep(100_000_000)
        for call in range(rounds):
            if collective == "gather":
                ctx.ccl.gather(result[call] if rank == root else None, given[call, 0], root)
            elif collective == "scatter":
                ctx.ccl.scatter(result[call, 0], given[call] if rank == root else None, root)
            elif collective == "broadcast":
                result[call].copy_(given[call])
                ctx.ccl.broadcast(result[call], root)
            elif rank == root:
                ctx.ccl.send(given[call], (root + 1) % size)
            elif rank == (root + 1) % size:
                ctx.ccl.recv(result[call], root)
        if collective == "gather" and rank == root:
            assert torch.equal(result, torch.stack([theirs[:, 0] for theirs in everyone], 1))
        elif collective == "scatter":
            assert torch.equal(result[:, 0], everyone[root][:, rank])
        elif collective == "broadcast":
            assert torch.equal(result, everyone[root])
        elif collective == "send" and rank == (root + 1) % size:
            assert torch.equal(result, everyone[root])


@mainly(2, 3)
@pytest.mark.parametrize("collective", ["gather", "scatter", "broadcast", "send"])
def test_a_rank_that_is_many_calls_behind(ranks, collective):
    if ranks.num_ranks > 1:
        ranks.run(run_ahead, collective, rounds_of(ranks, ROUNDS // 2))


def one_is_late(ctx):
    """Neighbours send all that they can before a late rank comes; each variant, twice."""
    rank, size = ctx.cur_rank, ctx.num_ranks
    given = torch.arange(3000.0, device=ctx.device)
    for (config, *_), late in itertools.product(VARIANTS.values(), (0, size - 2)):
        result = ctx.zeros(3000)
        if rank == late:
            time.sleep(0.3)
        ctx.ccl.all_reduce(result, given + rank, config=Config(**dict(config)))
        assert torch.equal(result, size * given + size * (size - 1) / 2)


@mainly(4)
def test_all_reduce_with_a_late_rank(ranks):
    ranks.run(one_is_late)


def one_after_the_other(ctx, rounds):
    """A result of one call is the input of the next, on tensors that stay: a ring of hand-overs, back and forth."""
    size, rank = ctx.num_ranks, ctx.cur_rank
    own, everyone, total = ctx.zeros(97), ctx.zeros(97 * size), ctx.zeros(97)
    generator = random.Random(rank)
    for call in range(rounds):
        own.copy_(torch.arange(97) + 1000 * rank + call)
        dawdle(ctx, generator)
        ctx.ccl.all_gather(everyone, own)
        ctx.ccl.all_reduce(total, everyone[97 * ((rank + 1) % size) :][:97])
        ctx.ccl.broadcast(own, call % size)
        assert everyone.view(size, 97)[:, 5].tolist() == [5.0 + 1000 * r + call for r in range(size)]
        assert total[7].item() == sum(7 + 1000 * r + call for r in range(size))
        assert own[11].item() == 11 + 1000 * (call % size) + call


@mainly(3)
def test_results_that_the_next_call_uses(ranks):
    ranks.run(one_after_the_other, rounds_of(ranks, ROUNDS // 2))


def groups(ctx, seed, rounds):
    """Overlapping groups in a random but common order."""
    size, rank = ctx.num_ranks, ctx.cur_rank
    everyone = list(range(size))
    members = [everyone, everyone[:-1], everyone[1:], [0, size - 1], everyone[1::2]]
    made = [None, *map(dist.new_group, members[1:])]
    arena = Arena(ctx.empty(ARENA_BYTES, dtype=torch.uint8))
    common, own = random.Random(seed), random.Random(f"{seed} {rank}")
    for call in range(rounds):
        which, case = common.randrange(len(made)), choose(common, [*MOVES, *SUMS])
        if rank in members[which]:
            dawdle(ctx, own)
            perform(ctx, arena, case, call, members[which], made[which])
    for group in made[1:]:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


@pytest.mark.ranks(4)
def test_groups_that_overlap(ranks):
    ranks.run(groups, "groups", ROUNDS)


def set_counts(ctx, to):
    """As if ``to`` (int32) calls and blocks had been, on a quiet world: what the library counts in device memory."""
    place = (to & 0xFFFF) << 48
    place -= (place >> 63) << 64
    for (operation, _), channel in ctx.ccl._communicators[None].workspace._channels.items():
        channel = channel.memory
        if operation.startswith("one hop of"):
            epochs_bytes, _ = one_hop.channel_bytes(ctx.num_ranks, int(operation.split()[3]))
            channel[:epochs_bytes].view(torch.int32).fill_(to)
        elif operation.startswith("accumulators of"):
            channel[-4 * int(operation.split()[2]) * ctx.num_ranks :].view(torch.int32).fill_(to)
        elif operation.startswith(("queues of", "counts of")):
            # Those for messages have counts, and words, of both directions on each stream.
            programs = int(operation.split()[2]) * (2 * P2P_SETS if operation.endswith("messages") else 1)
            counts, words = programs * COUNTS.value * 4, programs * WORDS.value * 8
            rows = channel[:counts].view(torch.int32).view(programs, COUNTS.value)
            rows.fill_(to)
            # Of blocks that are claimed: each call sets it back.
            rows[0, DONE.value + ctx.cur_rank] = 0
            rows = channel[counts : counts + words].view(torch.int64).view(programs, WORDS.value)
            rows[:, POSTS.value : POSTS.value + MAX_RANKS] = (to << 32) | (to & 0xFFFFFFFF)
            rows[:, PLACES_FROM.value :] = place


def near_the_wrap(ctx, bits, rounds):
    configs = [*CONFIGS, *VARIANTS["atomic"]]
    sequence(ctx, [*MOVES, *SUMS], "before", rounds, configs)
    sequence_by(ctx, "two_shot_direct", "before", rounds // 2)
    ctx.barrier()
    set_counts(ctx, (1 << bits) - 3 if bits < 32 else -3)
    ctx.barrier()
    sequence(ctx, [*MOVES, *SUMS], f"wrap of {bits} bits", rounds, configs)
    for variant in ("pull", "two_shot_direct"):
        sequence_by(ctx, variant, f"wrap of {bits} bits", rounds // 2)


@mainly(2)
@pytest.mark.parametrize("bits", [thorough(16), thorough(31), 32])
def test_counts_that_come_round(ranks, bits):
    """After so many calls or blocks that 16, 31 or 32 bits count; the test sets the counts to just before."""
    ranks.run(near_the_wrap, bits, 400 // ranks.num_ranks if EVERYTHING else 20)
