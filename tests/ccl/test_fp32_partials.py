"""`Config(fp32_partials=True)`: over several hosts a sum of narrow floats is rounded once, as on one."""

import functools

import pytest
import torch
import torch.distributed as dist
from patterns import assert_same_bits
from rank_pool import FEWER_HOSTS, Hosts

from ccl.calls import data, sample
from ccl.test_over_hosts import in_order
from iris.ccl import Config, ReduceOp
from iris.errors import InvalidConfigError, SeveralHostsError

ONCE = Config(fp32_partials=True)
NARROW = [torch.bfloat16, torch.float16, torch.float8_e5m2, torch.complex32]
OTHERS = [torch.float32, torch.float64, torch.complex64]


def once(by_host, op):
    """What float32 gives in one host after the other, in the order of ranks, then in the order of hosts; rounded."""
    dtype = by_host[0][0].dtype
    if dtype.is_complex:
        parts = [[torch.view_as_real(value) for value in values] for values in by_host]
        return torch.view_as_complex(once(parts, op).contiguous())
    combined = torch.mul if op is ReduceOp.PRODUCT else torch.add
    sums = [functools.reduce(combined, [value.float() for value in values]) for values in by_host]
    total = functools.reduce(combined, sums)
    return (total / sum(map(len, by_host)) if op is ReduceOp.AVG else total).to(dtype)


def add_up(ctx, hosts, cases):
    size = ctx.num_ranks
    for call, (collective, shape, dtype, op) in enumerate(cases):
        whole = (size * shape[0], *shape[1:]) if collective == "reduce_scatter" else shape
        inputs = [data(whole, dtype, rank, call, op) for rank in range(size)]
        by_host = [[inputs[rank] for rank in hosts.ranks_of(host)] for host in range(hosts.hosts)]
        if dtype in NARROW and op not in (ReduceOp.MIN, ReduceOp.MAX):
            expected = once(by_host, op)
        else:
            expected = in_order([in_order(values, op) for values in by_host], op)
        input, root = inputs[ctx.cur_rank].to(ctx.device, copy=True), call % size
        output = torch.empty(shape, dtype=dtype, device=ctx.device)
        if collective == "reduce":
            ctx.ccl.reduce(output if ctx.cur_rank == root else None, input, root, op=op, config=ONCE)
        else:
            getattr(ctx.ccl, collective)(output, input, op=op, config=ONCE)
        if collective == "reduce_scatter":
            expected = expected.view(size, *shape)[ctx.cur_rank]
        if collective != "reduce" or ctx.cur_rank == root:
            assert_same_bits(output, expected)


@pytest.mark.ranks(*FEWER_HOSTS)
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "reduce"])
def test_sums_are_rounded_once(ranks, collective):
    shapes = [(0,), (1,), (1021,), (7, 33)]
    cases = [
        (collective, shape, dtype, op)
        for shape, dtype, op in sample(12, f"once {collective}", shapes, [*NARROW, *OTHERS], ReduceOp)
        if not dtype.is_complex or op in (ReduceOp.SUM, ReduceOp.AVG)
    ]
    ranks.run(add_up, ranks.hosts, [*cases, (collective, (1021,), torch.bfloat16, ReduceOp.SUM)])


def differ(ctx, hosts):
    """Of enough elements some come out otherwise than by two roundings, or there would be nothing to ask for."""
    inputs = [data((4096,), torch.bfloat16, rank, 1, ReduceOp.SUM) for rank in range(ctx.num_ranks)]
    of_hosts = [in_order([inputs[rank] for rank in hosts.ranks_of(host)], None) for host in range(hosts.hosts)]
    output = torch.empty(4096, dtype=torch.bfloat16, device=ctx.device)
    ctx.ccl.all_reduce(output, inputs[ctx.cur_rank].to(ctx.device), config=ONCE)
    assert (output.cpu() != in_order(of_hosts, None)).sum() > 40


@pytest.mark.ranks(Hosts(2, 2), Hosts(3, 2), exactly=True)  # One of two hosts of one rank has nothing to round.
def test_the_second_rounding_makes_a_difference(ranks):
    ranks.run(differ, ranks.hosts)


def premultiply(ctx, hosts):
    inputs = [data((65,), torch.bfloat16, rank, 1, ReduceOp.SUM) for rank in range(ctx.num_ranks)]
    scaled = [(rank + 1.5) * value.float() for rank, value in enumerate(inputs)]
    sums = [functools.reduce(torch.add, [scaled[rank] for rank in hosts.ranks_of(h)]) for h in range(hosts.hosts)]
    output, own = torch.empty(65, dtype=torch.bfloat16, device=ctx.device), inputs[ctx.cur_rank].to(ctx.device)
    ctx.ccl.all_reduce(output, own, op=dist._make_nccl_premul_sum(ctx.cur_rank + 1.5), config=ONCE)
    assert_same_bits(output, functools.reduce(torch.add, sums).bfloat16())


@pytest.mark.ranks(Hosts(2, 2), Hosts(2, 3))
def test_factors_are_not_rounded_in_between(ranks):
    ranks.run(premultiply, ranks.hosts)


def ask_for_the_meaningless(ctx):
    x = torch.ones(4 * ctx.num_ranks, device=ctx.device)
    for call, text in (
        (lambda: ctx.ccl.all_reduce(x.int(), x.int(), config=ONCE), r"all_reduce\(\) of torch.int32, whose sums"),
        (lambda: ctx.ccl.all_to_all(x.clone(), x, config=ONCE), r"for all_to_all\(\), which adds nothing up"),
    ):
        with pytest.raises(InvalidConfigError, match=text):
            call()
    with pytest.raises(InvalidConfigError, match="fp32_partials is True or False"):
        Config(fp32_partials=1)
    with pytest.raises(SeveralHostsError, match=r"Config\(comm_sms=2, fp32_partials=True\) for ctx.ccl.all_reduce"):
        ctx.ccl.all_reduce(x, x, config=Config(comm_sms=2, fp32_partials=True))
    ctx.ccl.all_reduce(x, x, config=ONCE)
    assert x.tolist() == [ctx.num_ranks] * len(x)


@pytest.mark.ranks(Hosts(2, 2))
def test_where_it_has_no_meaning_ranks_are_told(mistaken, ranks):
    ranks.run(ask_for_the_meaningless)


def add_up_on_one_host(ctx):
    x = data((65,), torch.bfloat16, ctx.cur_rank, 1, ReduceOp.SUM).to(ctx.device)
    plain, asked = torch.empty_like(x), torch.empty_like(x)
    ctx.ccl.all_reduce(plain, x)
    ctx.ccl.all_reduce(asked, x, config=ONCE)
    assert_same_bits(asked, plain)


@pytest.mark.ranks(2)
def test_one_host_rounds_once_anyway(ranks):
    ranks.run(add_up_on_one_host)
