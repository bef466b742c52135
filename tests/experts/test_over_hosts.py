"""Experts of ranks on several hosts: what one host does, with rails between the hosts."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from covering import EVERYTHING, SAMPLED, thorough
from ops import test_experts_mlp
from rank_pool import FEWER_HOSTS, HOSTS, Hosts

from experts import (
    layers,
    test_async,
    test_bias,
    test_fp8,
    test_functional,
    test_misuse,
    test_num_tokens,
    test_options_together,
    test_padding,
    test_results,
    test_rounds,
)
from experts.layers import ROUTINGS, WEIGHTS, Layer, done_with, experts
from iris.errors import (
    InvalidConfigError,
    InvalidExpertsError,
    MismatchedCollectiveError,
    ReceivedUsedUpError,
    TooManyInFlightError,
)
from iris.experts import ExpertsConfig
from iris.experts.checks import quantized_dtype

F32, BF16 = torch.float32, torch.bfloat16
# Neither form knows of hosts; which is taken follows from the tokens of a host.
both_forms = pytest.mark.parametrize("low_latency", [False, layers.FEW], ids=["many", "few"])


@contextlib.contextmanager
def rows_by_rail(hosts):
    """Rows of an expert lie in the order of local ranks, of hosts, and of tokens."""
    by_host = [hosts.ranks_of(host) for host in range(hosts.hosts)]
    order = [ranks[local] for local in range(hosts.ranks_each) for ranks in by_host]
    with mock.patch.object(Layer, "in_order", staticmethod(lambda size: order)):
        yield


def over_hosts(ctx, hosts, worker, *given):
    with rows_by_rail(hosts):
        worker(ctx, *given)


@pytest.mark.ranks(*(HOSTS if EVERYTHING else HOSTS[::2]))
@pytest.mark.parametrize("routing", [*ROUTINGS[::2], *map(thorough, ROUTINGS[1::2])])
@pytest.mark.parametrize("weighting", WEIGHTS)
@pytest.mark.parametrize("layout", ["expanded", "compact"])
@pytest.mark.parametrize(("dtype", "ids"), [(F32, torch.int64), (BF16, torch.int32)])
@both_forms
def test_every_routing(ranks, low_latency, routing, weighting, layout, dtype, ids):
    ranks.run(over_hosts, ranks.hosts, test_results.results, low_latency, routing, weighting, layout, dtype, ids)


# Whose workers are told which form to take, and what else.
ALIKE = {
    "factors given": (test_fp8.given, (272, 7), test_fp8.E4M3, True, "compact"),
    "one factor a row": (test_fp8.given, (272, 7), test_fp8.E5M2, False, "expanded"),
    "number on the device": (test_num_tokens.counted, "dispatched", False),
    "number on the device, in halves": (test_num_tokens.counted, "combined", True),
    "options together": (test_options_together.together, test_options_together.FORMS[0], "compact", True),
    "one bias": (test_bias.biased, 1),
    "two biases": (test_bias.biased, 2),
    "micro-batches": (test_async.micro_batches, "combined", 7),
    "gradients": (test_functional.differentiate, "expanded", True, False),
    "compiled": (test_functional.differentiate, "compact", True, True),
    "rounds": (test_rounds.rounds, 7, 20),
    "the same bits": (test_rounds.twice,),
    "a rank ahead": (test_rounds.ahead,),
    "padding": (test_padding.padded, "compact", BF16, "fp8_block128", 272),
}

SAMPLE = ("options together",)


@pytest.mark.ranks(*FEWER_HOSTS)
@pytest.mark.parametrize("what", [each if each in SAMPLE else thorough(each) for each in ALIKE])
@pytest.mark.parametrize("low_latency", [thorough(False), layers.FEW], ids=["many", "few"])
def test_what_one_host_has(ranks, low_latency, what):
    worker, *given = ALIKE[what]
    ranks.run(over_hosts, ranks.hosts, worker, low_latency, *given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are for GPUs")
@pytest.mark.ranks(*HOSTS)
@both_forms
def test_replays_of_a_first_call(ranks, low_latency):
    ranks.run(over_hosts, ranks.hosts, test_rounds.replay, low_latency)


def divided(ctx, hosts, low_latency, quantize):
    """Before they cross the network. Each expert returns what it has got."""
    layer = Layer(ctx.num_ranks, BF16, ctx.device, hidden=272)
    ep = experts(ctx, layer, low_latency=low_latency)
    group = layer.hidden if quantize == "fp8_row" else 128
    # The sample of `test_every_routing` has the others.
    for round, routing in enumerate(ROUTINGS[1::2] if SAMPLED else ROUTINGS):
        x, ids, weights = layer.inputs(routing, round, ctx.cur_rank)
        x = x * torch.logspace(-6, 6, layer.hidden, device=ctx.device).to(BF16)
        received = ep.dispatch(x, ids, weights, quantize=quantize, async_op=round % 2 == 1)
        received = received.wait() if round % 2 else received
        blocks = -(-layer.hidden // group)
        assert received.rows.dtype == quantized_dtype() and received.scales.shape == (*received.rows.shape[:-1], blocks)
        rows = torch.where(layers.there(received)[..., None], test_fp8.dequantised(received), torch.nan)
        out = ep.combine(rows.to(BF16), received)
        padded = torch.nn.functional.pad(x.float(), (0, -layer.hidden % group)).unflatten(1, (blocks, group))
        # e4m3 has 3 bits after the leading one, and what is small beside the largest of a block loses more.
        error = (padded.abs() / 16 + padded.abs().amax(-1, keepdim=True) / 448 / 2**9).flatten(1)[:, : layer.hidden]
        total = (weights * (ids >= 0)).sum(dim=1, keepdim=True)
        assert ((out.float() - x.float() * total).abs() <= (error + x.float().abs() / 64) * total).all()
    done_with(ctx, ep)


@pytest.mark.thorough
@pytest.mark.ranks(*FEWER_HOSTS)
@pytest.mark.parametrize("quantize", ["fp8_row", "fp8_block128"])
@both_forms
def test_rows_that_are_divided_on_the_way(ranks, low_latency, quantize):
    ranks.run(divided, ranks.hosts, low_latency, quantize)


@pytest.mark.ranks(*FEWER_HOSTS)
@pytest.mark.parametrize("narrow", [False, thorough(True)])
def test_a_whole_layer(ranks, narrow):
    if narrow:
        ranks.run(over_hosts, ranks.hosts, test_experts_mlp.narrow_results, "uneven", "blocks", "rounded on the way")
    else:
        ranks.run(over_hosts, ranks.hosts, test_experts_mlp.results, "uneven", BF16, "silu_and_mul", True)


def storages(tensors):
    return {each.untyped_storage().data_ptr() for each in tensors}


def kept(ctx, quantize, counted):
    """What rails move, and what comes after them reads, is kept until `wait`, and for the stream that waits."""
    layer = Layer(ctx.num_ranks, BF16, ctx.device, hidden=256)
    ep = experts(ctx, layer, ExpertsConfig(layouts=("compact",)))
    rail, pend, moved, used = ep._calls._rail, ep._calls._pend, [], []

    def transfer(*given, **how):
        moved.extend([*how["sent"], *how["received"]])
        return type(rail)._transfer(rail, *given, **how)

    def spy(call, tensors, receive):
        used.extend(tensors)
        return pend(call, tensors, receive)

    with mock.patch.object(rail, "_transfer", transfer), mock.patch.object(ep._calls, "_pend", spy):
        for round in range(3):
            x, ids, weights = layer.inputs("random", round, ctx.cur_rank)
            count = torch.tensor([len(x)], dtype=torch.int32, device=ctx.device) if counted else None
            given = {"quantize": quantize, "num_tokens": count, "layout": "compact"}
            pending = ep.dispatch(x, ids, weights, **given, async_op=True)
            assert moved and storages(moved) <= storages(used)
            received = pending.wait()
            assert not counted or storages([received._num_tokens_there]) <= storages(used)
            used.clear()
            moved.clear()
            pending = ep.combine(torch.zeros_like(received.rows, dtype=BF16), received, async_op=True)
            assert moved and storages(moved) <= storages(used)
            used.clear()
            moved.clear()
            pending.wait()
    done_with(ctx, ep)


@pytest.mark.ranks(*FEWER_HOSTS)
@pytest.mark.parametrize(("quantize", "counted"), [(None, False), ("fp8_block128", True)])
def test_what_rails_move_is_kept(ranks, quantize, counted):
    ranks.run(kept, quantize, counted)


def of_a_group(ctx, hosts):
    """The last local ranks of all hosts have a group of their own; others, meanwhile, nothing to do."""
    members = sorted(hosts.ranks_of(host)[-1] for host in range(hosts.hosts))
    group = dist.new_group(members)
    if ctx.cur_rank not in members:
        return
    layer, rank = Layer(len(members), F32, ctx.device), members.index(ctx.cur_rank)
    ep = experts(ctx, layer, group=group)
    for round in range(3):
        _, _, out = test_results.call(layer, ep, "random", round, rank)
        test_results.compare(layer, out, "random", round, rank, "dispatched")
    received = ep.dispatch(*layer.inputs("random", 0, rank))
    received.release()
    ctx.barrier(group=group)
    ep.close()


@pytest.mark.ranks(*FEWER_HOSTS)
def test_a_group_with_ranks_of_all_hosts(ranks):
    ranks.run(of_a_group, ranks.hosts)


def refused(ctx):
    """By every rank, so that all go on."""
    layer = Layer(ctx.num_ranks, F32, ctx.device)
    with pytest.raises(InvalidExpertsError, match=rf"num_experts is a multiple of {ctx.num_ranks}"):
        ctx.experts(num_experts=layer.num_experts + 1, hidden=8, max_tokens=4, top_k=2)
    with pytest.raises(MismatchedCollectiveError, match="do not ask ctx.experts\\(\\) for the same"):
        ctx.experts(num_experts=layer.num_experts, hidden=8, max_tokens=4 + ctx.cur_rank, top_k=2)
    ep = experts(ctx, layer, ExpertsConfig(in_flight=2, layouts=("compact",)))
    x, ids, weights = layer.inputs("random", 1, ctx.cur_rank)

    def dispatch(x=x, ids=ids, weights=weights, layout="compact", **given):
        return ep.dispatch(x, ids, weights, layout=layout, **given)

    many = ids.new_zeros(layer.max_tokens + 1, 3), torch.zeros(layer.max_tokens + 1, 3, device=ctx.device)
    wrong = ids.new_full((layer.max_tokens, 3), layer.num_experts)
    for words, call in {
        f"got {layer.max_tokens + 1} tokens": lambda: dispatch(x.new_zeros(len(many[0]), layer.hidden), *many),
        "has no memory": lambda: dispatch(layout="expanded"),
        "takes topk_weights of shape": lambda: dispatch(weights=weights[:, :2]),
        f"is expert {layer.num_experts}": lambda: dispatch(
            x.new_zeros(len(wrong), layer.hidden), wrong, many[1][: len(wrong)]
        ),
        "takes num_tokens of shape": lambda: dispatch(num_tokens=torch.zeros(2, dtype=torch.int32, device=ctx.device)),
    }.items():
        # Expert numbers are looked at on GPUs with IRIS_DEBUG=1.
        with mock.patch("iris.experts.over_hosts.DEBUGGING", True), pytest.raises(InvalidExpertsError, match=words):
            call()
    first, second = dispatch(async_op=True), dispatch()
    with pytest.raises(TooManyInFlightError, match=r"called wait\(\) of dispatch\(\) over hosts"):
        dispatch()
    received = first.wait()
    for words, given in (
        ("takes y of shape", {"y": received.rows[1:]}),
        ("takes out of shape", {"out": x.new_empty(len(x) + 1, layer.hidden)}),
        ("out that is contiguous", {"out": x.new_empty(layer.hidden, len(x) + 1)[:, 1:].t()}),
        ("takes bias of shape", {"bias": x[:, 1:]}),
    ):
        with pytest.raises(InvalidExpertsError, match=words):
            ep.combine(**{"y": received.rows, "received": received, **given})
    out = ep.combine(layer.through_experts(received, ep.first_expert), received)
    test_results.compare(layer, out, "random", 1, ctx.cur_rank, "dispatched")
    with pytest.raises(ReceivedUsedUpError):
        ep.combine(received.rows, received)
    second.release()
    with pytest.raises(InvalidConfigError, match=r"overlap=True\) is not possible.*several hosts"):
        weights_of = test_experts_mlp.Weights(layer, 40).of(ep)
        ctx.ops.experts_mlp(torch.empty_like(x), x, ids, weights, **weights_of, experts=ep, overlap=True)
    done_with(ctx, ep)


@pytest.mark.ranks(Hosts(2, 2, dealt=True))
@pytest.mark.parametrize("worker", [refused, test_misuse.one_rank_has_no_room])
def test_what_is_refused(ranks, worker):
    ranks.run(worker)
