"""What dispatch and combine cannot do is said before anything is enqueued, on the rank that asked for it."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import iris
from experts.layers import K, Layer, done_with, experts
from iris.errors import (
    HeapClosedError,
    InvalidCollectiveError,
    InvalidConfigError,
    InvalidExpertsError,
    MismatchedCollectiveError,
    NotATensorError,
    PeerFailedError,
    ReceivedUsedUpError,
    TooManyInFlightError,
    WrongDeviceError,
)
from iris.experts import ExpertsConfig, calls, checks, memory

T, H, MOST, E = 4, 20, 7, 3
X, IDS, WEIGHTS = torch.zeros(T, H), torch.zeros(T, K, dtype=torch.int64), torch.zeros(T, K)
DISPATCHES = {
    "no tensor": (NotATensorError, "dispatch.. takes tensors", {"x": None}),
    "on another device": (WrongDeviceError, "Move it there first", {"x": X.to("meta")}),
    "sparse": (InvalidCollectiveError, "memory of their own", {"x": X.to_sparse()}),
    "one dimension": (InvalidExpertsError, r"\[tokens, 20\]; it got \[80\]", {"x": X.flatten()}),
    "another width": (InvalidExpertsError, r"\[tokens, 20\]; it got \[4, 19\]", {"x": X[:, 1:]}),
    "another dtype": (InvalidExpertsError, "x of shape .* torch.float32 or .*; it got .*float16", {"x": X.half()}),
    "too many tokens": (
        InvalidExpertsError,
        "got 8 tokens, and .*max_tokens=7",
        {"x": torch.zeros(8, H), "topk_ids": torch.zeros(8, K, dtype=torch.int64)},
    ),
    "fewer choices": (InvalidExpertsError, r"topk_ids of shape \[4, 3\]", {"topk_ids": IDS[:, 1:]}),
    "choices of fewer tokens": (InvalidExpertsError, r"topk_ids .* it got \[3, 3\]", {"topk_ids": IDS[1:]}),
    "choices that are no integers": (InvalidExpertsError, "torch.int32 or torch.int64", {"topk_ids": WEIGHTS}),
    "other weights": (InvalidExpertsError, r"topk_weights of shape \[4, 3\]", {"topk_weights": WEIGHTS[1:]}),
    "weights of another dtype": (InvalidExpertsError, "and torch.float32", {"topk_weights": WEIGHTS.double()}),
    "an expert too large": (
        InvalidExpertsError,
        "choice 2 of token 1 is expert 3; .* from 0 to 2",
        {"topk_ids": IDS.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(E))},
    ),
    "an expert too small": (InvalidExpertsError, "choice 0 of token 0 is expert -2", {"topk_ids": IDS - 2}),
    "fp8 without factors": (InvalidExpertsError, "x_scales not given", {"x": X.to(torch.float8_e5m2)}),
    "factors without fp8": (InvalidExpertsError, "x_scales given, quantize=None", {"x_scales": torch.ones(T, 1)}),
    "rows that end anywhere": (InvalidExpertsError, "a multiple of 16, and hidden is 20", {"quantize": "fp8_row"}),
    "another way to quantise": (InvalidExpertsError, "None, 'fp8_row', 'fp8_block128'", {"quantize": "int8"}),
    "gradients": (InvalidExpertsError, "no gradients", {"x": X.clone().requires_grad_()}),
    "another layout": (InvalidExpertsError, "it takes one of 'expanded', 'compact'", {"layout": "flat"}),
    "a layout without memory": (InvalidExpertsError, "Name it there", {"layout": "compact"}),
}
COMBINES = {
    "rows of another shape": (InvalidExpertsError, r"y of shape \[3, 7, 20\]", {"y": torch.zeros(21, H)}),
    "rows of another dtype": (InvalidExpertsError, "y of shape", {"y": torch.zeros(E, MOST, H).half()}),
    "other weights": (InvalidExpertsError, "topk_weights of shape", {"topk_weights": WEIGHTS[1:]}),
    "another result": (InvalidExpertsError, r"out of shape \[4, 20\]", {"out": X[1:]}),
    "a result by columns": (InvalidExpertsError, r"strides are \(1, 4\)", {"out": torch.zeros(H, T).T}),
    "nothing received": (InvalidExpertsError, "has returned, and got None", {"received": None}),
    "rows for what was received": (InvalidExpertsError, "has returned, and got a Tensor", {"received": X}),
}


def refused(error, words, call, given):
    with pytest.raises(error, match=words) as raised:
        call(**given)
    assert len(str(raised.value)) > 40


def on(device, given):
    return {
        role: value.to(device) if isinstance(value, torch.Tensor) and value.device.type == "cpu" else value
        for role, value in given.items()
    }


@pytest.fixture(scope="module")
def alone():
    """A context of one rank, also where there are more."""
    group = None
    if dist.is_initialized():
        group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    with iris.iris(1 << 22, process_group=group) as ctx:
        yield ctx


@pytest.fixture
def checked(monkeypatch):
    """As with IRIS_DEBUG=1: expert numbers are looked at on GPUs, too."""
    monkeypatch.setattr(calls, "DEBUGGING", True)


def layer_of(ctx, **config):
    return experts(ctx, Layer(1, torch.float32, ctx.device), ExpertsConfig(**config))


@pytest.mark.parametrize("case", DISPATCHES)
def test_dispatch(alone, checked, case):
    error, words, given = DISPATCHES[case]
    ep = layer_of(alone, layouts=("expanded",))
    # Also where calls like it have been checked before.
    ep.dispatch(**on(alone.device, {"x": X, "topk_ids": IDS}))
    refused(error, words, ep.dispatch, on(alone.device, {"x": X, "topk_ids": IDS} | given))
    # It has not begun.
    ep.dispatch(**on(alone.device, {"x": X, "topk_ids": IDS}))


@pytest.mark.parametrize("case", COMBINES)
def test_combine(alone, case):
    error, words, given = COMBINES[case]
    ep = layer_of(alone)
    received = ep.dispatch(**on(alone.device, {"x": X, "topk_ids": IDS}))
    ep.combine(received.rows, received)
    received = ep.dispatch(**on(alone.device, {"x": X, "topk_ids": IDS}))
    refused(error, words, ep.combine, on(alone.device, {"y": received.rows, "received": received} | given))
    ep.combine(received.rows, received)


@pytest.mark.parametrize("row", [0, 3, E * MOST - T])
def test_a_result_where_rows_are(alone, row):
    """They are added up after others have been written."""
    ep = layer_of(alone)
    received = ep.dispatch(**on(alone.device, {"x": X, "topk_ids": IDS}))
    out = received.rows.flatten(0, -2)[row : row + T]
    refused(
        InvalidExpertsError,
        "an out that overlaps its y",
        ep.combine,
        {"y": received.rows, "received": received, "out": out},
    )
    # Of rows that a program has made elsewhere it may be there.
    ep.combine(received.rows.clone(), received, out=out)


def test_what_nobody_has_waited_for_is_not_combined(alone):
    ep = layer_of(alone)
    pending = ep.dispatch(**on(alone.device, {"x": X, "topk_ids": IDS}), async_op=True)
    refused(
        InvalidExpertsError, r"call wait\(\) of <PendingCall of dispatch", ep.combine, {"y": X, "received": pending}
    )
    received = pending.wait()
    ep.combine(received.rows, received)


def test_what_a_dispatch_returns_is_used_once_and_by_its_own(alone):
    ep, other = layer_of(alone), layer_of(alone)
    given = on(alone.device, {"x": X, "topk_ids": IDS})
    first, second = ep.dispatch(**given), ep.dispatch(**given)
    refused(InvalidExpertsError, "is of another one", other.combine, {"y": first.rows, "received": first})
    with pytest.raises(TooManyInFlightError, match=r"2 results .*ExpertsConfig\(in_flight=2\)"):
        ep.dispatch(**given)
    ep.combine(first.rows, first)
    refused(ReceivedUsedUpError, "combine.. has ended", ep.combine, {"y": first.rows, "received": first})
    second.release()
    for again in (second.release, second.to_host, lambda: ep.combine(second.rows, second)):
        refused(ReceivedUsedUpError, "release.. has ended", again, {})
    ep.dispatch(**given)
    ep.close()
    ep.close()
    refused(HeapClosedError, "Make another one", ep.dispatch, given)


SIZES = {"num_experts": 4, "hidden": 8, "max_tokens": 2, "top_k": 2}


@pytest.mark.parametrize(
    ("error", "words", "given"),
    [
        (InvalidExpertsError, "top_k is 1 or more", {"top_k": 0}),
        (InvalidExpertsError, "hidden is 1 or more", {"hidden": 2.5}),
        (InvalidExpertsError, "at most 4 of 4", {"top_k": 5}),
        (InvalidExpertsError, "at most 4096", {"num_experts": 4097}),
        (InvalidExpertsError, "by 32 bits", {"max_tokens": 1 << 30}),
        (
            InvalidExpertsError,
            "would set .* TiB .* aside on each rank.* for 2 in flight, with rows in 'expanded' and 'compact'",
            {"max_tokens": 1 << 24, "hidden": 1 << 20},
        ),
        (InvalidExpertsError, "bfloat16, torch.float16 or", {"dtype": torch.int8}),
        (InvalidExpertsError, "bfloat16, torch.float16 or", {"dtype": "bf16"}),
        (InvalidConfigError, "iris.experts.ExpertsConfig, or None", {"config": "fast"}),
        (
            InvalidConfigError,
            "up to 32768 tokens of .* A host has 1 ranks here, .* hosts, 32769,",
            {"max_tokens": 32769, "config": ExpertsConfig(low_latency=True)},
        ),
    ],
)
def test_sizes(alone, error, words, given):
    refused(error, words, alone.experts, SIZES | given)


@pytest.mark.parametrize(
    ("name", "value"),
    [("in_flight", 0), ("in_flight", True), ("alignment", 1 << 20), ("num_sms", 1.5), ("layouts", ()), ("layouts", 3)]
    + [("low_latency", 1)],
)
def test_configurations(name, value):
    with pytest.raises(InvalidConfigError, match=f"{name} is a"):
        ExpertsConfig(**{name: value})


def one_rank_errs(ctx):
    """The others know nothing of it, and go on when it has made the call that they have made."""
    layer = Layer(ctx.num_ranks, torch.float32, ctx.device)
    ep = experts(ctx, layer)
    x, ids, weights = layer.inputs("random", 0, ctx.cur_rank)
    if ctx.cur_rank == 0:
        refused(InvalidExpertsError, "topk_ids of shape", ep.dispatch, {"x": x, "topk_ids": ids[:, 1:]})
    received = ep.dispatch(x, ids, weights)
    made = layer.through_experts(received, ep.first_expert)
    if ctx.cur_rank == 1:
        refused(InvalidExpertsError, "y of shape", ep.combine, {"y": made[1:], "received": received})
    out = ep.combine(made, received)
    assert torch.equal(out.double(), layer.expected("random", 0, ctx.cur_rank, True))
    done_with(ctx, ep)


def numbers_are_not_looked_at(ctx):
    """As on GPUs: what is no expert gets no row, and gives none."""
    layer = Layer(ctx.num_ranks, torch.float32, ctx.device)
    ep = experts(ctx, layer)
    x, ids, weights = layer.inputs("random", 0, ctx.cur_rank)
    outs = []
    with mock.patch.object(checks, "check_numbers"):
        for wrong in (-1, -2, layer.num_experts, 1 << 31, (1 << 32) + 1, -(1 << 40)):
            given = ids.clone()
            given[1::2, 0] = given[::3, 2] = wrong
            received = ep.dispatch(x, given, weights)
            outs.append(ep.combine(layer.through_experts(received, ep.first_expert), received))
    assert all(torch.equal(out, outs[0]) for out in outs) and outs[0].any()
    done_with(ctx, ep)


def ranks_differ(ctx):
    """Of what is made together each rank knows."""
    own = {"dtype": torch.int8} if ctx.cur_rank == 0 else {}
    words = "bfloat16" if ctx.cur_rank == 0 else "rank 0 could not set memory aside"
    refused(InvalidExpertsError if ctx.cur_rank == 0 else PeerFailedError, words, ctx.experts, SIZES | own)
    refused(MismatchedCollectiveError, "for the same", ctx.experts, SIZES | {"hidden": 8 + ctx.cur_rank})
    refused(InvalidExpertsError, "a multiple of 2", ctx.experts, SIZES | {"num_experts": 5})


def one_rank_calls_differently(ctx):
    """With IRIS_DEBUG=1 all say what each has called, in the words of the call; and nothing has begun."""
    layer = Layer(ctx.num_ranks, torch.float32, ctx.device, hidden=256)
    ep, here = experts(ctx, layer, ExpertsConfig(in_flight=1)), ctx.cur_rank == 0
    x, ids, weights = layer.inputs("random", 0, ctx.cur_rank)
    cases = {
        "quantize='fp8_block128', 2 scales a row; .*quantize=None, 0 scales": {"quantize": "fp8_block128"},
        "quantize=None, 1 scales a row; rank 1 calls .*torch.float32, quantize=None, 0 scales": {
            "x": x.to(torch.float8_e5m2),
            "x_scales": torch.ones(len(x), 1, device=ctx.device),
        },
        "no weights, .* weights given": {"topk_weights": None},
        "layout='compact', .* layout='expanded'": {"layout": "compact"},
    }
    with mock.patch.object(calls, "DEBUGGING", True):
        for words, other in cases.items():
            given = {"x": x, "topk_ids": ids, "topk_weights": weights} | (other if here else {})
            with pytest.raises(MismatchedCollectiveError, match=words):
                ep.dispatch(**given)
        received = ep.dispatch(x, ids, weights)
        out = ep.combine(layer.through_experts(received, ep.first_expert), received)
    assert torch.equal(out.double(), layer.expected("random", 0, ctx.cur_rank, True))
    done_with(ctx, ep)


def one_rank_has_no_room(ctx):
    """None has them then, and all may ask for less."""
    here = ctx.cur_rank == ctx.num_ranks - 1
    full = mock.patch.object(memory, "keep", side_effect=torch.OutOfMemoryError("out of memory"))
    words = "^out of memory" if here else f"rank {ctx.num_ranks - 1} could not set memory aside for experts: .*OutOfMem"
    with full if here else contextlib.nullcontext():
        with pytest.raises(torch.OutOfMemoryError if here else PeerFailedError, match=words):
            ctx.experts(**SIZES)
    ep = ctx.experts(**SIZES | {"dtype": torch.float32})
    x, ids = torch.ones(2, 8, device=ctx.device), torch.arange(2, device=ctx.device).expand(2, 2)
    received = ep.dispatch(x, ids)
    assert (ep.combine(received.rows, received) == 2).all()
    done_with(ctx, ep)


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize(
    "worker",
    [one_rank_errs, numbers_are_not_looked_at, ranks_differ, one_rank_calls_differently, one_rank_has_no_room],
)
def test_one_of_two_ranks(ranks, worker):
    ranks.run(worker)
