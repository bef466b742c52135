"""A layer of experts as an operator: results and all gradients are those of one process that has all experts."""

import contextlib
import dataclasses
import importlib
from unittest import mock

import pytest
import torch
from covering import EVERYTHING, UNDER_TORCHRUN, thorough
from experts.layers import ROUTINGS, Layer, done_with, experts
from rank_pool import Hosts

import iris
from iris.errors import GroupAbortedError, InvalidExpertsError
from iris.experts import ExpertsConfig
from iris.experts.functional import name_of
from iris.ops import functional
from ops.test_experts_mlp import ERRORS, Weights, close

F32, BF16 = torch.float32, torch.bfloat16
CONFIG = ExpertsConfig(layouts=("compact",), alignment=4, in_flight=1)


def of_loss(layer, round, rank):
    """The gradient of a rank's result."""
    generator = torch.Generator().manual_seed(1000 * round + rank)
    wanted = torch.randn(layer.tokens(round, rank), layer.hidden, generator=generator)
    return wanted.to(layer.device, layer.dtype)


def in_one_process(layer, weights, routing, round, weighted):
    """In float64: each rank's result, and the gradients of its tokens and weights; those of all matrices."""
    up, down = (each.double().requires_grad_() for each in weights.given)
    found, losses = [], []
    for rank in range(layer.size):
        x, ids, factors = layer.inputs(routing, round, rank)
        x, factors = x.double().requires_grad_(), factors.double().requires_grad_()
        made = torch.einsum("th,tkih->tki", x, up[ids.clamp(min=0)])
        if weights.activation:
            gate, made = made.chunk(2, dim=-1)
            made = torch.nn.functional.silu(gate) * made
        made = torch.einsum("tki,tkhi->tkh", made, down[ids.clamp(min=0)])
        there = (ids >= 0) * (factors if weighted else torch.ones_like(factors))
        out = (made * there[:, :, None]).sum(dim=1)
        losses.append((out * of_loss(layer, round, rank).double()).sum())
        found.append((out, x, factors))
    sum(losses).backward()
    return [(out.detach(), x.grad, factors.grad) for out, x, factors in found], (up.grad, down.grad)


def layer_of(name, activation):
    def forward(x, ids, factors, w_up, w_down):
        return functional.experts_mlp(x, ids, factors, w_up, w_down, name, activation)

    return forward


@contextlib.contextmanager
def new_memory_is_nan():
    """Of what torch allocates: nothing may be read that nobody has written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def differentiate(ctx, routings, dtype, inner, activation, weighted, compiled, alignment):
    with new_memory_is_nan():
        gradients(ctx, routings, dtype, inner, activation, weighted, compiled, alignment)


def gradients(ctx, routings, dtype, inner, activation, weighted, compiled, alignment):
    layer = Layer(ctx.num_ranks, dtype, ctx.device, hidden=48)
    ep = experts(ctx, layer, dataclasses.replace(CONFIG, alignment=alignment))
    weights = Weights(layer, inner, activation)
    eager = layer_of(name_of(ep), activation)
    forward = torch.compile(eager, fullgraph=True, backend="aot_eager", dynamic=True) if compiled else eager
    mine = slice(ep.first_expert, ep.first_expert + ep.num_local_experts)
    for round, routing in enumerate(routings):
        every, of_matrices = in_one_process(layer, weights, routing, round, weighted)
        out, of_x, of_factors = every[ctx.cur_rank]
        x, ids, factors = layer.inputs(routing, round, ctx.cur_rank)
        matrices = weights.of(ep)
        leaves = [x, factors, *(matrices[role].clone() for role in ("w_up", "w_down"))]
        for each in leaves:
            each.requires_grad_()
        given = x, ids, factors if weighted else None, *leaves[2:]
        got = forward(*given)
        close(got.detach(), out, ERRORS[dtype])
        if compiled:
            assert torch.equal(got, eager(*given))
        got.backward(of_loss(layer, round, ctx.cur_rank))
        wanted = [of_x, of_factors, *(each[mine] for each in of_matrices)]
        for leaf, exact in zip(leaves, wanted, strict=True):
            if leaf is factors and not weighted:
                assert leaf.grad is None
            else:
                close(leaf.grad, exact, 2 * ERRORS[dtype])
    done_with(ctx, ep)


@pytest.mark.ranks(*((1, 2, 3) if EVERYTHING else (2,)))
@pytest.mark.parametrize(
    ("dtype", "inner", "activation", "weighted", "compiled", "alignment"),
    [
        thorough(F32, 40, "silu_and_mul", True, True, 4),
        (BF16, 40, "silu_and_mul", True, False, 1),
        thorough(BF16, 40, "silu_and_mul", True, False, 4),
        # Rows that are no multiple of 16 bytes.
        (F32, 37, None, False, False, 4),
        thorough(F32, 37, None, False, False, 1),
    ],
)
def test_results_and_gradients(ranks, dtype, inner, activation, weighted, compiled, alignment):
    routings = ROUTINGS if EVERYTHING else ("uneven", "twice the same")
    ranks.run(differentiate, routings, dtype, inner, activation, weighted, compiled, alignment)


def frozen(ctx):
    """Experts that do not train: gradients of tokens alone, and their matrices have none."""
    layer = Layer(ctx.num_ranks, F32, ctx.device, hidden=48)
    ep, weights = experts(ctx, layer, CONFIG), Weights(layer, 40)
    every, _ = in_one_process(layer, weights, "random", 0, True)
    x, ids, factors = layer.inputs("random", 0, ctx.cur_rank)
    matrices = weights.of(ep)
    functional.experts_mlp(x.requires_grad_(), ids, factors, **matrices, experts=name_of(ep)).backward(
        of_loss(layer, 0, ctx.cur_rank)
    )
    close(x.grad, every[ctx.cur_rank][1], 2 * ERRORS[F32])
    assert factors.grad is None and all(each.grad is None for each in matrices.values())
    # Also where a graph of the gradient is asked for.
    out = functional.experts_mlp(x, ids, factors, **matrices, experts=name_of(ep))
    (again,) = torch.autograd.grad(out, x, of_loss(layer, 0, ctx.cur_rank), create_graph=True)
    assert torch.equal(again, x.grad)
    narrow = Weights(Layer(ctx.num_ranks, BF16, ctx.device, hidden=256), 128, scales="blocks").of(ep)
    with pytest.raises(InvalidExpertsError, match=r"weights of torch.float8\w+ has no gradient"):
        wide = experts(ctx, Layer(ctx.num_ranks, BF16, ctx.device, hidden=256), CONFIG)
        tokens = torch.zeros(2, 256, device=ctx.device, dtype=BF16, requires_grad=True)
        functional.experts_mlp(tokens, ids.new_zeros(2, 3), None, **narrow, experts=name_of(wide))
    done_with(ctx, wide)
    done_with(ctx, ep)


@pytest.mark.ranks(2)
def test_experts_that_do_not_train(ranks):
    ranks.run(frozen)


def fail_between(ctx, place):
    """A rank's memory ends between its dispatch and its combine, for which the others wait."""
    with iris.iris(1 << 20) as own:
        fail_in(own, place)
    ctx.barrier()


def fail_in(ctx, place):
    layer = Layer(ctx.num_ranks, F32, ctx.device, hidden=48)
    ep, weights = experts(ctx, layer, CONFIG), Weights(layer, 40)
    x, ids, factors = layer.inputs("random", 0, ctx.cur_rank)
    given = (x.requires_grad_(), ids, factors, *weights.of(ep).values(), name_of(ep))
    out = functional.experts_mlp(*given)
    module, name = {
        "forward": ("experts_mlp", "multiply"),
        "gradient": ("experts_functional", "differentiate_activation"),
        "gradient's first dispatch": ("experts_functional", "sums_of_rows"),
    }[place]
    makes = importlib.import_module(f"iris.ops.{module}")
    usual = getattr(makes, name)

    def fail(*arguments, only_prepare=False, **more):
        if only_prepare:
            return usual(*arguments, only_prepare=True, **more)
        raise MemoryError("no memory is left")

    last = ctx.num_ranks - 1
    expected = MemoryError if ctx.cur_rank == last else GroupAbortedError
    with mock.patch.object(makes, name, fail if ctx.cur_rank == last else usual):
        with pytest.raises(expected) as told:
            if place == "forward":
                functional.experts_mlp(*given)
            else:
                out.backward(of_loss(layer, 0, ctx.cur_rank))
            functional.experts_mlp(*given)
    assert ctx.cur_rank == last or f"rank {last}" in str(told.value)


@pytest.mark.ranks(2, Hosts(2, 2))
@pytest.mark.parametrize("place", ["forward", thorough("gradient"), thorough("gradient's first dispatch")])
@pytest.mark.skipif(UNDER_TORCHRUN, reason="not tried where kernels wait on a GPU")
def test_nobody_waits_for_a_rank_that_fails_between(ranks, mistaken, place):
    ranks.run(fail_between, place)


def schema(ctx):
    layer = Layer(ctx.num_ranks, F32, ctx.device, hidden=48)
    ep, weights = experts(ctx, layer, CONFIG), Weights(layer, 40)
    x, ids, factors = layer.inputs("random", 0, ctx.cur_rank)
    given = (x.requires_grad_(), ids, factors.requires_grad_(), *weights.of(ep).values(), name_of(ep))
    tests = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    found = torch.library.opcheck(torch.ops.iris.experts_mlp.default, given, test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}
    assert not torch.ops.iris.experts_mlp.default._schema.is_mutable
    done_with(ctx, ep)


@pytest.mark.thorough
@pytest.mark.ranks(1)
def test_torch_checks_the_operator(ranks):
    """What it changes, what it returns for stand-ins, and its gradients in a graph."""
    ranks.run(schema)
