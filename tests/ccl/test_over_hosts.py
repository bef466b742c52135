"""Collectives over several hosts: the same results as on one, but that sums are rounded once more."""

import functools
import time

import pytest
import torch
import torch.distributed as dist
from covering import EVERYTHING, SAMPLED, UNDER_TORCHRUN
from patterns import assert_same_bits, pattern
from rank_pool import HOSTS, Hosts, needs_gloo

import iris
from ccl.calls import LAYOUTS, PLACES, Arena, Case, data, perform, sample
from ccl.test_results import MOVED, SHAPES, SUMMED, meaningful
from iris.ccl import Config, ReduceOp, functional
from iris.ccl.collectives import Collectives
from iris.ccl.over_hosts import CollectivesOverHosts
from iris.errors import (
    GroupAbortedError,
    InvalidCollectiveError,
    MismatchedCollectiveError,
    RankOutOfRangeError,
    UnknownChoiceError,
    UnsupportedReductionError,
)

# Of a test, where everything is to be tested: each takes many launches; on GPUs, many kernels that are compiled.
MOST_CASES = 5 if UNDER_TORCHRUN else 60
MOVES = ["all_gather", "all_to_all", "all_to_all_v", "broadcast", "gather", "scatter"]
COMBINES = ["all_reduce", "reduce_scatter", "reduce"]


def move(ctx, cases):
    move_among(ctx, cases, ctx.empty(32 << 20, dtype=torch.uint8))


def move_among(ctx, cases, memory, members=None, group=None):
    arena = Arena(memory)
    for call, case in enumerate(cases):
        perform(ctx, arena, case, call, members, group)


@pytest.mark.ranks(*HOSTS)
@pytest.mark.parametrize("collective", MOVES)
def test_data_arrive_bit_by_bit(ranks, collective):
    cases = [
        Case(collective, shape, dtype, root=root, input_place=source, output_place=target, layout=layout)
        for shape, dtype, root, source, target, layout in sample(
            12 if EVERYTHING else 6, collective, SHAPES, MOVED, range(ranks.num_ranks), PLACES, PLACES, LAYOUTS
        )[:MOST_CASES]
    ]
    ranks.run(move, [*cases, Case("all_gather", (7, 129), torch.bfloat16, in_place=True)])


def in_order(values, op):
    """What one step makes of these: float32 (or float64, or the integers) in their order, rounded once."""
    dtype = values[0].dtype
    if dtype.is_complex:
        return torch.view_as_complex(in_order([torch.view_as_real(value) for value in values], op))
    narrow = dtype.is_floating_point and dtype.itemsize <= 4
    wide = torch.float32 if narrow else torch.float64 if dtype.is_floating_point else torch.int64
    combined = {
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.PRODUCT: torch.mul,
    }.get(op, torch.add)
    total = functools.reduce(combined, [value.to(wide) for value in values])
    return (total / len(values) if op is ReduceOp.AVG else total).to(dtype)


def combine(ctx, hosts, cases, members=None, group=None):
    """Each result is, bit by bit, that of one step within each host, and one over the hosts."""
    members = list(range(ctx.num_ranks)) if members is None else members
    size, places = len(members), [hosts.host_of(rank) for rank in members]
    for call, (collective, shape, dtype, op, layout) in enumerate(cases):
        whole = (size * shape[0], *shape[1:]) if collective == "reduce_scatter" else shape
        inputs = {rank: data(whole, dtype, rank, call, op) for rank in members}
        by_host = [[inputs[rank] for rank in members if hosts.host_of(rank) == host] for host in sorted({*places})]
        expected = in_order([in_order(values, op) for values in by_host], op)
        input = inputs[ctx.cur_rank].to(ctx.device, copy=True)
        if layout == "stepped":
            input = torch.stack([input, input], -1)[..., 0]
        if collective == "reduce_scatter":
            expected = expected.view(size, *shape)[members.index(ctx.cur_rank)]
            output = torch.empty(shape, dtype=dtype, device=ctx.device)
        else:
            # On the heap, which all ranks have to allocate.
            empty = ctx.empty if group is None else functools.partial(torch.empty, device=ctx.device)
            output = input if layout == "in place" else empty(shape, dtype=dtype)
        root = members[call % size]
        here = root == ctx.cur_rank
        try:
            if collective == "reduce":
                ctx.ccl.reduce(output if here else None, input, root, op=op, group=group)
            else:
                getattr(ctx.ccl, collective)(output, input, op=op, group=group)
            if collective != "reduce" or here:
                assert_same_bits(output, expected)
        except Exception as error:
            raise AssertionError(
                f"call {call}, {collective} of {list(shape)} {dtype}, {op}, {layout}: {error}"
            ) from error


@pytest.mark.ranks(*HOSTS)
@pytest.mark.parametrize("collective", COMBINES)
def test_sums_are_rounded_in_the_host_and_over_hosts(ranks, collective):
    shapes, layouts = [(0,), (1,), (3,), (1021,), (4, 256), (7, 33), (3, 5, 17)], ["plain", "stepped", "in place"]
    number = 30 if EVERYTHING else 12
    cases = [
        (collective, shape, dtype, op, layout)
        for shape, dtype, op, layout in sample(number, collective, shapes, SUMMED, ReduceOp, layouts)[:MOST_CASES]
        if meaningful(dtype, op)
    ]
    ranks.run(combine, ranks.hosts, cases)


def repeat(ctx, hosts):
    """Rounds with other data, in which each rank in turn is late to some calls: the bits are always the same."""
    size = ctx.num_ranks
    for turn in range(size):
        inputs = [data((37,), torch.bfloat16, rank, turn, ReduceOp.SUM) for rank in range(size)]
        of_hosts = [in_order([inputs[rank] for rank in hosts.ranks_of(host)], None) for host in range(hosts.hosts)]
        total, everyone = ctx.empty(37, dtype=torch.bfloat16), ctx.empty(size * 37, dtype=torch.bfloat16)
        if turn == ctx.cur_rank:
            time.sleep(0.02)
        ctx.ccl.all_reduce(total, inputs[ctx.cur_rank].to(ctx.device))
        if turn == size - 1 - ctx.cur_rank:
            time.sleep(0.02)
        work = ctx.ccl.all_gather(everyone, total, async_op=True)
        assert work.wait()
        assert_same_bits(everyone.view(size, 37), in_order(of_hosts, None).expand(size, 37))
        ctx.ccl.barrier()


LATE_ON = (Hosts(2, 2, dealt=True),) + (() if SAMPLED else (Hosts(2, 3), Hosts(2, 2), Hosts(4, 1)))


@pytest.mark.ranks(*LATE_ON)
def test_late_ranks_change_no_bit(ranks):
    ranks.run(repeat, ranks.hosts)


def premultiply(ctx, hosts):
    """Each rank's factor is its own."""
    inputs = [data((5, 8), torch.float32, rank, 1, ReduceOp.SUM) for rank in range(ctx.num_ranks)]
    scaled = [(rank + 1.5) * value for rank, value in enumerate(inputs)]
    of_hosts = [in_order([scaled[rank] for rank in hosts.ranks_of(host)], None) for host in range(hosts.hosts)]
    output, own = torch.empty(5, 8, device=ctx.device), inputs[ctx.cur_rank].to(ctx.device)
    ctx.ccl.all_reduce(output, own, op=dist._make_nccl_premul_sum(ctx.cur_rank + 1.5))
    assert_same_bits(output, in_order(of_hosts, None))


@pytest.mark.ranks(Hosts(2, 2), Hosts(2, 3))
def test_factors_are_those_of_ranks(ranks):
    ranks.run(premultiply, ranks.hosts)


def call_operators(ctx):
    """With their gradients, which are collectives too."""
    ranks, size = functional.name_of(ctx), ctx.num_ranks
    places = torch.arange(2.0 * size, device=ctx.device).view(size, 2)
    x = ((ctx.cur_rank + 1) * places).requires_grad_()
    total = functional.all_reduce(functional.all_gather(functional.reduce_scatter(x, ranks), ranks), ranks)
    assert torch.equal(total, size * (size * (size + 1) / 2) * places)
    (total * (places + 3)).sum().backward()
    assert torch.equal(x.grad, size * size * (places + 3))


@pytest.mark.ranks(Hosts(2, 2), Hosts(3, 2))
def test_operators_span_hosts(ranks):
    ranks.run(call_operators)


def use_groups(ctx, hosts):
    """A group of one host's ranks has every collective, also those that all ranks do not have yet."""
    groups = [dist.new_group(hosts.ranks_of(host)) for host in range(hosts.hosts)]
    group, size = groups[ctx.host], ctx.num_local_ranks
    mine = pattern((3, 4), torch.int32, ctx.cur_rank).to(ctx.device)
    everyone = torch.cat([pattern((3, 4), torch.int32, rank) for rank in ctx.local_ranks])
    for collective in ("all_gather", "gather"):
        output, root = ctx.empty(3 * size, 4, dtype=torch.int32), (ctx.local_ranks[-1],) * (collective == "gather")
        getattr(ctx.ccl, collective)(output, mine, *root, group=group, config=Config(comm_sms=2))
        if not root or ctx.cur_rank == root[0]:
            assert_same_bits(output, everyone)
    ctx.device_barrier(group)
    ctx.barrier(group=group)


@pytest.mark.ranks(Hosts(2, 2, dealt=True), Hosts(2, 3))
def test_a_group_within_a_host_has_all_collectives(ranks):
    ranks.run(use_groups, ranks.hosts)


def be_some_of_all(ctx, members):
    """Roots are named by their ranks in the world, which are not those in the context."""
    group = dist.new_group(members)
    if ctx.cur_rank in members:
        with iris.iris(1 << 20, process_group=group) as some:
            assert (some.num_ranks, some.num_hosts, some.num_local_ranks) == (len(members), 2, len(members) // 2)
            x = pattern((3,), torch.int32, ctx.cur_rank)
            everyone = torch.cat([pattern((3,), torch.int32, rank) for rank in members])
            for root in members:
                sent, gathered, part = x.clone(), torch.empty_like(everyone), torch.empty_like(x)
                some.ccl.broadcast(sent, root)
                assert_same_bits(sent, pattern((3,), torch.int32, root))
                some.ccl.gather(gathered, x, root)
                if ctx.cur_rank == root:
                    assert_same_bits(gathered, everyone)
                some.ccl.scatter(part, everyone if ctx.cur_rank == root else None, root)
                assert_same_bits(part, x)
            some.ccl.all_gather(gathered, x)
            assert_same_bits(gathered, everyone)
            with pytest.raises(UnknownChoiceError):
                some.ccl.broadcast(x, 0)
    ctx.barrier()


@pytest.mark.ranks(Hosts(2, 3), exactly=True)
@pytest.mark.parametrize("members", [[1, 2, 3, 5], [2, 4]])
def test_a_context_may_have_some_of_the_ranks_of_each_host(ranks, members):
    ranks.run(be_some_of_all, members)


def ask_for_the_wrong(ctx):
    """The ranks are refused alike, before anything has moved, and go on."""
    size = ctx.num_ranks
    x, long = torch.ones(size + 1, device=ctx.device), torch.ones(size * (size + 1), device=ctx.device)
    with pytest.raises(InvalidCollectiveError, match=rf"all_gather\(\) among {size} ranks .* an output of"):
        ctx.ccl.all_gather(x.new_empty(3), x)
    with pytest.raises(InvalidCollectiveError, match="multiple of"):
        ctx.ccl.reduce_scatter(x.new_empty(1), x)
    with pytest.raises(InvalidCollectiveError, match="overlap in memory"):
        ctx.ccl.all_gather(long, long[1 : size + 2])
    with pytest.raises(UnsupportedReductionError, match="AVG"):
        ctx.ccl.all_reduce(x.int(), x.int(), op=ReduceOp.AVG)
    with pytest.raises(RankOutOfRangeError):
        ctx.ccl.broadcast(x, size)
    ctx.ccl.all_reduce(x, x)
    assert x.tolist() == [size] * (size + 1)


@pytest.mark.ranks(Hosts(2, 2))
def test_wrong_arguments_are_told(mistaken, ranks):
    ranks.run(ask_for_the_wrong)


def call_differently(ctx, calls):
    """The hosts' calls differ, so their ranks are out of step: an error on all, and the context is of no more use."""
    with iris.iris(1 << 20) as other:
        x = torch.ones(4 + calls.startswith("size") * ctx.host)
        # Whoever finds it first breaks the group, and may be faster than this rank.
        found = (MismatchedCollectiveError, GroupAbortedError)
        with pytest.raises(found, match="rank . on host0 calls .*; rank . on host1 calls "):
            if calls == "another call" and ctx.host == 1:
                other.device_barrier()
            else:
                other.ccl.all_reduce(x, x, op=ReduceOp.MAX if calls == "op" and ctx.host else ReduceOp.SUM)
        with pytest.raises(GroupAbortedError, match="ended with MismatchedCollectiveError: The hosts do not"):
            other.barrier()


@needs_gloo
@pytest.mark.ranks(Hosts(2, 2), Hosts(2, 2, dealt=True))
@pytest.mark.parametrize("calls", ["size", "op", "another call"])
def test_hosts_that_make_other_calls_are_told(ranks, calls):
    ranks.run(call_differently, calls)


def refuse_alike(ctx):
    x = torch.ones(4, device=ctx.device)
    with pytest.raises(InvalidCollectiveError, match="memory of their own"):
        ctx.ccl.broadcast(x.to_sparse())
    ctx.ccl.broadcast(x)
    with pytest.raises(InvalidCollectiveError, match="memory of their own"):
        ctx.ccl.gather(x.to_sparse(), x.to_sparse())
    ctx.ccl.all_reduce(x, x)


@pytest.mark.ranks(Hosts(2, 2))
def test_ranks_that_refuse_alike_go_on(ranks):
    ranks.run(refuse_alike)


ROOTED = {
    "broadcast": lambda ccl, x, mine, config: ccl.broadcast(mine, config=config),
    "gather": lambda ccl, x, mine, config: ccl.gather(x.new_empty(len(x) * dist.get_world_size()), mine, config=config),
    "scatter": lambda ccl, x, mine, config: ccl.scatter(
        mine, x.new_ones(len(x) * dist.get_world_size()), config=config
    ),
    "reduce": lambda ccl, x, mine, config: ccl.reduce(x.clone(), mine, config=config),
}


def refuse_what_all_give(ctx, name, asked, config):
    """The root refuses alone, and says so where the others come: on the rails, or to the vendor's communicator."""
    call = ROOTED[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IRIS_OVER_HOSTS", asked)
        with iris.iris(1 << 20) as other:
            x, start = torch.ones(4), time.monotonic()
            if other.cur_rank == 0:
                with pytest.raises(InvalidCollectiveError, match="memory of their own"):
                    call(other.ccl, x, x.to_sparse(), config)
            else:
                with pytest.raises(
                    (GroupAbortedError, MismatchedCollectiveError), match=rf"{name}\(\), which was refused"
                ):
                    call(other.ccl, x, x, config)
                    other.barrier()
            assert time.monotonic() - start < 10


def refuse_as_root(ctx):
    """What the root alone gives is wrong: it is told so, and the ranks of all hosts do not wait for it."""
    with iris.iris(1 << 20) as other:
        x, start = torch.ones(4), time.monotonic()
        if other.cur_rank == 0:
            with pytest.raises(InvalidCollectiveError, match="needs an output of"):
                other.ccl.gather(torch.empty(3), x)
        else:
            with pytest.raises(GroupAbortedError, match="rank 0 is the root of gather.*needs an output of"):
                other.ccl.gather(None, x)
                other.ccl.all_reduce(x, x)
        assert time.monotonic() - start < 10


@needs_gloo
@pytest.mark.ranks(Hosts(2, 2), *([Hosts(2, 2, dealt=True)] if EVERYTHING else []))
def test_nobody_waits_for_a_root_that_refuses(ranks):
    ranks.run(refuse_as_root)
    for asked, config in (("iris", None), ("vendor", None), ("vendor", Config(over_hosts="iris"))):
        for name in ROOTED:
            ranks.run(refuse_what_all_give, name, asked, config)


def public(cls):
    return {name for name in dir(cls) if not name.startswith("_")}


def test_every_collective_is_either_built_or_refused():
    """None is that of the host's ranks by oversight."""
    # Messages are those of two ranks, and which two is looked at below them.
    of_groups = {"communicator", "release_graphs", "barrier", "forget", "close", "send", "recv"}
    own = public(CollectivesOverHosts) & set(vars(CollectivesOverHosts)) - {"sends_at_once"}
    assert own | of_groups == public(Collectives) and not own & of_groups
