"""dispatch and combine as operators: results and all gradients are those of one process that has all experts."""

import pytest
import torch
from covering import EVERYTHING, SAMPLED, thorough

from experts.layers import ROUTINGS, K, Layer, M, both_forms, done_with, experts
from iris.errors import InvalidExpertsError
from iris.experts import ExpertsConfig, functional


def matrices(layer, which):
    """An expert's matrix: what it multiplies rows by."""
    generator = torch.Generator().manual_seed(3)
    every = torch.randn(layer.num_experts, layer.hidden, layer.hidden, generator=generator, dtype=torch.float64)
    return every[which].to(layer.device)


def gradients_of_out(layer, round, rank):
    generator = torch.Generator().manual_seed(1000 * round + rank)
    wanted = torch.randn(layer.tokens(round, rank), layer.hidden, generator=generator, dtype=torch.float64)
    return wanted.to(layer.device)


def in_one_process(layer, routing, round, weighted):
    """Each rank's result and the gradients of its tokens and weights; those of all matrices."""
    matrix = matrices(layer, slice(None)).requires_grad_()
    found, losses = [], []
    for rank in range(layer.size):
        x, ids, weights = layer.inputs(routing, round, rank)
        x, weights = x.double().requires_grad_(), weights.double().requires_grad_()
        made = torch.einsum("th,tkhj->tkj", x, matrix[ids.clamp(min=0)])
        there = (ids >= 0) * (weights if weighted else torch.ones_like(weights))
        out = (made * there[:, :, None]).sum(dim=1)
        losses.append((out * gradients_of_out(layer, round, rank)).sum())
        found.append((out, x, weights))
    sum(losses).backward()
    return [(out.detach(), x.grad, weights.grad) for out, x, weights in found], matrix.grad


def layer_of(name, layout, offsets_of_rows):
    def forward(x, ids, weights, matrix):
        rows, counts, offsets = functional.dispatch(x, ids, name, layout)
        expert = torch.searchsorted(offsets[1:].contiguous(), offsets_of_rows, right=True)
        expert = expert.clamp(max=len(counts) - 1)
        flat = rows.flatten(0, -2)
        y = torch.zeros_like(flat)
        for each in range(len(counts)):
            y = y + torch.where((expert == each)[:, None], flat @ matrix[each], 0)
        return functional.combine(y.view(rows.shape), ids, weights, name, layout)

    return forward


def differentiate(ctx, low_latency, layout, weighted, compiled):
    layer = Layer(ctx.num_ranks, torch.float32, ctx.device)
    ep = experts(ctx, layer, low_latency=low_latency)
    name = functional.name_of(ep)
    assert functional.name_of(ep) == name
    room = torch.Size(functional.calls_of(name).rows_shape(layout)[:-1]).numel()
    forward = layer_of(name, layout, torch.arange(room, dtype=torch.int32, device=ctx.device))
    if compiled:
        forward = torch.compile(forward, fullgraph=True, backend="aot_eager", dynamic=True)
    mine = slice(ep.first_expert, ep.first_expert + ep.num_local_experts)
    for round, routing in enumerate(ROUTINGS[1::2] if SAMPLED else ROUTINGS):
        every, of_matrices = in_one_process(layer, routing, round, weighted)
        out, of_x, of_weights = every[ctx.cur_rank]
        x, ids, weights = layer.inputs(routing, round, ctx.cur_rank)
        x.requires_grad_(), weights.requires_grad_()
        matrix = matrices(layer, mine).float().requires_grad_()
        got = forward(x, ids, weights if weighted else None, matrix)
        got.backward(gradients_of_out(layer, round, ctx.cur_rank).float())
        close = {"rtol": 1e-4, "atol": 1e-3}
        torch.testing.assert_close(got.double(), out, **close)
        torch.testing.assert_close(x.grad.double(), of_x, **close)
        torch.testing.assert_close(matrix.grad.double(), of_matrices[mine], **close)
        if weighted:
            torch.testing.assert_close(weights.grad.double(), of_weights, **close)
    done_with(ctx, ep)


@pytest.mark.ranks(*((1, 2, 3) if EVERYTHING else (2,)))
@pytest.mark.parametrize(
    ("layout", "weighted", "compiled"),
    [
        ("compact", True, False),
        thorough("expanded", True, False),
        ("compact", False, False),
        thorough("compact", True, True),
    ],
)
@both_forms
def test_results_and_gradients(ranks, low_latency, layout, weighted, compiled):
    ranks.run(differentiate, low_latency, layout, weighted, compiled)


def mistake(ctx):
    layer = Layer(ctx.num_ranks, torch.float32, ctx.device)
    ep = experts(ctx, layer)
    x, ids, _ = layer.inputs("random", 0, ctx.cur_rank)
    with pytest.raises(InvalidExpertsError, match=r"No experts have the name 'mine'.*name_of\(ep\)"):
        functional.dispatch(x, ids, "mine")
    with pytest.raises(InvalidExpertsError, match=r"name_of\(\) takes what ctx.experts\(\) has made, and got 'mine'"):
        functional.name_of("mine")
    for call in (lambda: functional.dispatch(x, ids, ep), lambda: functional.combine(x, ids, None, ep)):
        with pytest.raises(InvalidExpertsError, match=r"experts=<ExpertParallel .* it is a name, .*name_of\(ep\)"):
            call()
    name, many = functional.name_of(ep), ids.new_zeros(M + 1, K)
    for call in (
        lambda: functional.dispatch(x.new_zeros(M + 1, layer.hidden), many, name),
        lambda: functional.combine(x.new_zeros(functional.calls_of(name).rows_shape("compact")), many, None, name),
    ):
        with pytest.raises(InvalidExpertsError, match=rf"got {M + 1} tokens, .*max_tokens={M}"):
            call()
    done_with(ctx, ep)


def mistake_of_rows(ctx):
    """Nothing has begun: no memory is in use, and no rank waits for one that was refused."""
    layer = Layer(ctx.num_ranks, torch.float32, ctx.device)
    ep = experts(ctx, layer, ExpertsConfig(in_flight=1))
    name, (x, ids, weights) = functional.name_of(ep), layer.inputs("random", 0, ctx.cur_rank)
    rows, _, _ = functional.dispatch(x, ids, name)
    refusals = {
        "takes y of shape .*; it got .*float16": {"y": rows.half()},
        r"takes y of shape \[": {"y": rows[1:]},
        "takes topk_weights of shape": {"topk_weights": weights[:, 1:]},
        "takes topk_ids of shape": {"topk_ids": ids.float()},
        "takes one of 'expanded', 'compact'": {"layout": "flat"},
    }
    given = {"y": rows, "topk_ids": ids, "topk_weights": weights, "experts": name}
    # By one rank alone, another one each time.
    for number, (words, wrong) in enumerate(refusals.items()):
        if ctx.cur_rank == number % ctx.num_ranks:
            with pytest.raises(InvalidExpertsError, match=words):
                functional.combine(**given | wrong)
    assert torch.equal(functional.combine(**given), x * (weights * (ids >= 0)).sum(dim=1, keepdim=True))
    done_with(ctx, ep)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("worker", [mistake, mistake_of_rows])
def test_mistakes_are_told(ranks, mistaken, worker):
    ranks.run(worker)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_products_of_rows_do_not_overflow(dtype):
    """Gradients of factors: those of rows are as large as a program scales its loss."""
    left, right = torch.full((2, 4), 300.0, dtype=dtype), torch.full((2, 4), 256.0, dtype=dtype)
    assert functional.products(left, right).tolist() == [4 * 300.0 * 256.0] * 2


def test_factors_of_rows_are_differentiable():
    rows, factors = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True), torch.tensor([2.0, 3.0])
    functional.scaled(rows, factors).sum().backward()
    assert rows.grad.tolist() == [[2.0, 2.0], [3.0, 3.0]]
