"""Collectives as operators: torch.compile keeps them in one graph, and their gradients are those of plain torch."""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.exc import Unsupported

import iris
from ccl.calls import EVERYTHING
from iris.ccl import functional
from iris.distributed.contexts import context_of
from iris.errors import InvalidCollectiveError, InvalidGroupError, UnsupportedReductionError


def reference(call, inputs, rank, argument):
    """What ``call`` gives to ``rank``, by plain torch on the inputs of all ranks."""
    size, stacked = len(inputs), torch.stack(inputs)
    if call == "all_reduce":
        return {"sum": stacked.sum(0), "avg": stacked.mean(0), "max": stacked.amax(0)}[argument]
    if call == "all_gather":
        return torch.cat(inputs)
    if call == "reduce_scatter":
        return (stacked.mean(0) if argument == "avg" else stacked.sum(0)).chunk(size)[rank]
    if call == "all_to_all":
        return torch.cat([each.chunk(size, dim=1)[rank] for each in inputs], dim=1)
    if call == "reduce":
        return stacked.sum(0) if rank == argument else torch.zeros_like(inputs[0])
    return inputs[argument]


CALLS = [
    ("all_reduce", "sum"), ("all_reduce", "avg"), ("all_gather", None), ("reduce_scatter", "sum"),
    ("reduce_scatter", "avg"), ("all_to_all", None), ("broadcast", 1), ("reduce", 1),
]  # fmt: skip


def compare(ctx, group, members, compiler):
    size, me, ranks = len(members), members.index(ctx.cur_rank), functional.name_of(ctx, group)
    generator = torch.Generator().manual_seed(5)

    def random(shape):
        return torch.randn(shape, generator=generator).to(ctx.device)

    arguments = [() if a is None else (members[a] if call in ("broadcast", "reduce") else a,) for call, a in CALLS]
    inputs = [[random((2 * size, 3 * size)).requires_grad_() for _ in members] for _ in CALLS]
    mine = [each[me].detach().clone().requires_grad_() for each in inputs]

    def function(xs):
        every = zip(CALLS, xs, arguments, strict=True)
        return [2 * getattr(functional, call)(torch.sin(x), ranks, *more) for (call, _), x, more in every]

    results = (torch.compile(function, backend=compiler, fullgraph=True) if compiler else function)(mine)
    expected = [[2 * reference(call, [torch.sin(x) for x in xs], rank, argument) for rank in range(size)]
                for (call, argument), xs in zip(CALLS, inputs, strict=True)]  # fmt: skip
    torch.testing.assert_close(results, [outputs[me] for outputs in expected])
    # Every rank weighs the elements in its own way; the gradient is that of the sum of all ranks' losses.
    weights = [[random(output.shape) for output in outputs] for outputs in expected]
    sum((result * weight[me]).sum() for result, weight in zip(results, weights, strict=True)).backward()
    pairs = zip(sum(expected, []), sum(weights, []), strict=True)
    sum((output * weight).sum() for output, weight in pairs).backward()
    for (call, _), x, xs in zip(CALLS, mine, inputs, strict=True):
        reached = call != "broadcast" or me == 1
        torch.testing.assert_close(x.grad, xs[me].grad if reached else torch.zeros_like(x))


def of_all(ctx, compiler):
    compare(ctx, None, list(range(ctx.num_ranks)), compiler)


def of_some(ctx):
    members = [ctx.num_ranks - 2, ctx.num_ranks - 1]
    group = dist.new_group(members)
    if ctx.cur_rank in members:
        compare(ctx, group, members, None)


@pytest.mark.thorough
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"] if EVERYTHING else ["aot_eager"])
def test_compiled_results_and_gradients(ranks, compiler):
    ranks.run(of_all, compiler)


@pytest.mark.ranks(3)
def test_results_and_gradients_in_a_group(ranks):
    ranks.run(of_some)


def check_registrations(ctx):
    ranks, shape = functional.name_of(ctx), (2 * ctx.num_ranks, 3 * ctx.num_ranks)
    x = torch.randn(shape, device=ctx.device, requires_grad=True)
    for call, argument in CALLS:
        arguments = () if argument is None else (argument,)
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(getattr(torch.ops.iris, call).default, (x, ranks, *arguments), test_utils=checks)
    gathered = torch.ops.iris.all_gather.default(x.detach(), ranks)
    assert gathered.shape == (ctx.num_ranks * shape[0], shape[1])


def test_registrations(ranks):
    ranks.run(check_registrations)


def refused(ctx):
    ranks, size = functional.name_of(ctx), ctx.num_ranks
    x = torch.ones(3, device=ctx.device, requires_grad=True)
    assert functional.name_of(ctx) == ranks
    assert functional.all_reduce(x.detach(), ranks, "max").tolist() == [1.0] * 3
    with pytest.raises(UnsupportedReductionError, match="no gradient of op='max'"):
        functional.all_reduce(x, ranks, "max").sum().backward()
    with pytest.raises(InvalidGroupError, match="'nowhere'.*name_of"):
        functional.all_reduce(x.detach(), "nowhere")
    with pytest.raises(UnsupportedReductionError, match="op='mean' is not one of 'sum', 'avg'"):
        functional.all_reduce(x.detach(), ranks, "mean")
    for given, message in (((None,), "takes a context.*None"), ((ctx, [0]), r"group=\[0\] is not a process group")):
        with pytest.raises(InvalidGroupError, match=message):
            functional.name_of(*given)
    for gather in (functional.all_gather, torch.compile(functional.all_gather, backend="aot_eager")):
        with pytest.raises(Exception, match=r"all_gather\(\) takes rows.*x.reshape\(1\)"):
            gather(x.detach().sum(), ranks)
    with pytest.raises(InvalidCollectiveError, match=f"rows is a multiple of {size}; it got \\[{size + 1}, 2\\]"):
        functional.reduce_scatter(torch.ones(size + 1, 2, device=ctx.device), ranks)


def test_what_makes_no_sense_is_refused(ranks):
    ranks.run(refused)


def named_inside(ctx):
    """Ranks that have a name stay in the graph; the first call that asks for it breaks the graph."""
    with iris.iris(1 << 16) as own:
        torch.compiler.reset()

        def doubled(x):
            return 2 * functional.all_reduce(x, functional.name_of(own))

        x = torch.ones(4, device=ctx.device)
        with pytest.raises(Unsupported, match=r"first call of name_of\(\).*make it before"):
            torch.compile(doubled, backend="aot_eager", fullgraph=True)(x)
        torch.compiler.reset()
        assert torch.compile(doubled, backend="aot_eager")(x).tolist() == [2 * ctx.num_ranks] * 4
        torch.compiler.reset()
        assert torch.compile(doubled, backend="aot_eager", fullgraph=True)(x).tolist() == [2 * ctx.num_ranks] * 4


def test_a_name_is_asked_for_in_a_compiled_function(ranks):
    ranks.run(named_inside)


def into_parameters(ctx):
    """Columns of a matrix, which are copied: kernels cannot write them as they lie."""
    me = ctx.cur_rank
    parameter = torch.nn.Parameter(torch.full((3, 2), float(me), device=ctx.device).t())
    given = torch.full((2, 3), 5.0 + me, device=ctx.device)
    derived = torch.full((3, 2), 1.0 + me, device=ctx.device, requires_grad=True).t() * 2
    for call, expected in (
        (lambda: ctx.ccl.broadcast(parameter, 1), 1),
        (lambda: ctx.ccl.all_reduce(parameter, given), 11),
        (lambda: ctx.ccl.send(given, 0) if me else ctx.ccl.recv(parameter, 1), 11 if me else 6),
        (lambda: ctx.ccl.broadcast(derived, 1), 11 if me else 6),
    ):
        call()
        assert (parameter == expected).all() and parameter.requires_grad and parameter.is_leaf
    assert (derived == 4).all() and derived.grad_fn.name() == "MulBackward0"


@pytest.mark.ranks(2, exactly=True)
def test_parameters_are_written_as_other_tensors_are(ranks):
    ranks.run(into_parameters)


def after_a_destroyed_group(ctx):
    """The context of a group is closed when an operator of another group runs after the group's end."""
    first, second = (dist.new_group(backend="gloo") for _ in range(2))
    for number, group in enumerate((first, second, first, second)):
        x = torch.full((3,), ctx.cur_rank + number, dtype=torch.float32, device=ctx.device)
        total = functional.all_reduce(x, functional.name_of_process_group(group.group_name))
        assert total.tolist() == [sum(rank + number for rank in range(ctx.num_ranks))] * 3
    old, kept = context_of(first), context_of(second)
    dist.destroy_process_group(first)
    third = dist.new_group(backend="gloo")
    assert not old.heap.closed
    assert torch.equal(functional.all_reduce(x, functional.name_of_process_group(third.group_name)), total)
    assert old.heap.closed and context_of(second) is kept
    for group in (second, third):
        dist.destroy_process_group(group)


@pytest.mark.ranks(2, exactly=True)
def test_a_destroyed_group_gives_back_its_context(ranks):
    ranks.run(after_a_destroyed_group)
