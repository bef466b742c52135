"""What the calls of the host take as arguments: what torch takes, and errors of their own for anything else."""

import collections
import math
import operator

import numpy
import pytest
import torch
import torch.distributed as dist
from torch_factories import Torch

import iris
from iris.ccl import Config
from iris.errors import IrisError
from iris.experts import ExpertsConfig
from iris.ops import FusedConfig, grouped_mm


class Index:
    """An integer of another library."""

    def __index__(self):
        return 3


# Two of each kind in which Python, numpy and torch have numbers and sizes, and what is neither.
VALUES = {
    "None": None,
    "a string": "3",
    "bytes": b"3",
    "a float": 3.0,
    "True": True,
    "NaN": math.nan,
    "infinity": math.inf,
    "complex": 3j,
    "negative": -1,
    "2**31": 2**31,
    "2**63": 2**63,
    "2**70": 2**70,
    "numpy's integer": numpy.int32(3),
    "numpy's float": numpy.float64(3.0),
    "numpy's bool": numpy.bool_(True),
    "numpy's array of one": numpy.array([3]),
    "numpy's array": numpy.array([2, 3]),
    "a tensor's integer": torch.tensor(3),
    "a tensor's float": torch.tensor(3.0),
    "a tensor's bool": torch.tensor(True),
    "a tensor": torch.tensor([2, 3]),
    "a size": torch.Size([2, 3]),
    "an empty list": [],
    "a list with None": [2, None],
    "a list with a string": [2, "3"],
    "a list with a float": (2, 1.0),
    "a negative extent": (2, -1),
    "True first": [True, 2],
    "True second": (2, True),
    "numpy's integer in a tuple": (numpy.int64(3), 2),
    "a tensor's integer in a list": [torch.tensor(3), 2],
    "no elements": (2**62, 0),
    "no elements of too many": (2**62, 2**62, 0),
    "a range": range(2, 4),
    "a deque": collections.deque([2]),
    "a set": {2},
    "a dict": {2: 3},
    "an object": object(),
    "a type": Index,
    "a dtype": torch.int8,
}


FACTORIES = {
    "the size of empty": lambda t, v: t.empty(v),
    "the size of zeros, by name": lambda t, v: t.zeros(size=v),
    "the second extent of ones": lambda t, v: t.ones(2, v),
    "the size of full": lambda t, v: t.full(v, 1),
    "the size of randint": lambda t, v: t.randint(5, v),
    "the size of uniform": lambda t, v: t.uniform(v),
    "the count of allocate": lambda t, v: t.allocate(v, torch.int16),
    "the steps of linspace": lambda t, v: t.linspace(0, 1, v),
    "the value of full": lambda t, v: t.full((2,), v),
    "the value of full, of int8": lambda t, v: t.full((2,), v, dtype=torch.int8),
    "the value of full_like": lambda t, v: t.full_like(torch.ones(2, 3), v),
    "the end of arange": lambda t, v: t.arange(v),
    "the start of arange": lambda t, v: t.arange(v, 4),
    "the step of arange": lambda t, v: t.arange(0, 6, v),
    "the start of linspace": lambda t, v: t.linspace(v, 9, 3),
    "high of randint": lambda t, v: t.randint(v, (2,)),
    "low of randint": lambda t, v: t.randint(v, 5, (2,)),
    "high of randint, of int8": lambda t, v: t.randint(0, v, (2,), dtype=torch.int8),
    "low of uniform": lambda t, v: t.uniform(2, v),
    "a dtype": lambda t, v: t.zeros(2, dtype=v),
    "requires_grad": lambda t, v: t.zeros(2, requires_grad=v),
    "requires_grad of integers": lambda t, v: t.zeros(2, dtype=torch.int32, requires_grad=v),
    "pin_memory": lambda t, v: t.zeros(2, pin_memory=None if v is True else v),
    "a memory format": lambda t, v: t.empty(2, memory_format=v),
    "a generator": lambda t, v: t.rand(2, generator=v),
    "a dtype of rand": lambda t, v: t.rand(2, dtype=v),
}
SIZES = [name for name in FACTORIES if name.startswith(("the size", "the second extent", "the count", "the steps"))]

# What Iris takes besides: sizes nested further, and integers of any kind where torch takes tuples or Python's alone.
ALSO_SIZES = {
    "numpy's integer", "a tensor's integer", "a size", "an empty list", "True first", "numpy's integer in a tuple",
    "a tensor's integer in a list", "no elements", "True second",
}  # fmt: skip
# What no heap of this size holds.
TOO_LARGE = ("2**31",)


@pytest.fixture(scope="module")
def ctx():
    """A context of one rank, also where there are more."""
    alone = None
    if dist.is_initialized():
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    with iris.iris(1 << 22, process_group=alone) as context:
        yield context


def _outcome(call):
    """The shape and dtype of what ``call`` makes, or the error that it ends in."""
    try:
        result = call()
    except Exception as error:
        return error
    return tuple(result.shape), result.dtype


@pytest.mark.parametrize("argument", FACTORIES)
def test_the_factories_take_what_torch_takes(ctx, argument):
    """And refuse what torch refuses, with an error of Iris that names the call and is torch's kind of error."""
    make = FACTORIES[argument]
    for kind, value in VALUES.items():
        if kind in TOO_LARGE and argument in (*SIZES, "the end of arange"):
            continue
        # A call may resize the tensor that it is given.
        expected, result = _outcome(lambda: make(Torch(), value)), _outcome(lambda: make(ctx, value))  # noqa: B023
        case = f"{argument}: {kind}, torch: {expected!r:.200}, Iris: {result!r:.200}"
        if not isinstance(expected, Exception):
            assert result == expected, case
        elif isinstance(result, Exception):
            assert isinstance(result, IrisError | MemoryError), case
            assert isinstance(result, TypeError | RuntimeError | ValueError | MemoryError), case
            assert "unsupported operand" not in str(result) and len(str(result)) > 40, case
        else:
            assert argument in SIZES and kind in ALSO_SIZES, case


def of_experts(ctx, **given):
    sizes = {"num_experts": 2, "hidden": 8, "max_tokens": 4, "top_k": 2, "dtype": torch.float32}
    return ctx.experts(**sizes | given)


def dispatched(ep, **given):
    x = torch.ones(4, 8, device=ep.device)
    return ep.dispatch(x, torch.zeros(4, 2, dtype=torch.int64, device=ep.device), **given)


def layer_of_experts(ctx, **given):
    x, ids = ctx.ones(4, 8, dtype=torch.float32), torch.zeros(4, 2, dtype=torch.int64, device=ctx.device)
    weights = {"w_up": ctx.ones(2, 4, 8), "w_down": ctx.ones(2, 8, 4), "activation": None}
    given = {"out": x, "x": x, "topk_ids": ids, "topk_weights": None, **weights} | given
    return ctx.ops.experts_mlp(**{"experts": of_experts(ctx)} | given)


HERE = {
    "heap_size": lambda ctx, v: iris.iris(v).close(),
    "process_group": lambda ctx, v: iris.Iris(1 << 20, process_group=v).close(),
    "peer()": lambda ctx, v: ctx.peer(ctx.zeros(4), v),
    "broadcast()": lambda ctx, v: ctx.broadcast(1, v),
    "barrier() of a stream": lambda ctx, v: ctx.barrier(v),
    "barrier() of a group": lambda ctx, v: ctx.barrier(group=v),
    "device_barrier()": lambda ctx, v: ctx.device_barrier(v),
    "free()": lambda ctx, v: ctx.free(v),
    "communicator()": lambda ctx, v: ctx.ccl.communicator(v),
    "release_graphs()": lambda ctx, v: ctx.ccl.release_graphs(v),
    "src": lambda ctx, v: ctx.ccl.broadcast(ctx.zeros(4), v),
    "dst": lambda ctx, v: ctx.ccl.reduce(ctx.zeros(4), ctx.ones(4), v),
    "op": lambda ctx, v: ctx.ccl.all_reduce(ctx.zeros(4), ctx.ones(4), op=v),
    "group": lambda ctx, v: ctx.ccl.all_gather(ctx.zeros(4), ctx.ones(4), group=v),
    "config": lambda ctx, v: ctx.ccl.all_to_all(ctx.zeros(4), ctx.ones(4), config=v),
    "workspace": lambda ctx, v: ctx.ccl.all_reduce(ctx.zeros(4), ctx.ones(4), workspace=v),
    "counts": lambda ctx, v: ctx.ccl.all_to_all_v(ctx.zeros(4), ctx.ones(4), v, [0], [1], [0]),
    "a displacement": lambda ctx, v: ctx.ccl.all_to_all_v(ctx.zeros(4), ctx.ones(4), [1], [v], [1], [0]),
    "an output": lambda ctx, v: ctx.ccl.reduce_scatter(v, ctx.ones(4)),
    "a product's config": lambda ctx, v: ctx.ops.matmul_all_gather(*(ctx.ones(16, 16) for _ in "ABC"), config=v),
    "a product's bias": lambda ctx, v: ctx.ops.matmul_all_gather(*(ctx.ones(16, 16) for _ in "ABC"), v),
    "offs": lambda ctx, v: grouped_mm(ctx.ones(2, 16), ctx.ones(1, 16, 16), offs=v),
    "scale_a": lambda ctx, v: grouped_mm(ctx.ones(1, 2, 16), ctx.ones(1, 16, 16), scale_a=v),
    "activation": lambda ctx, v: grouped_mm(ctx.ones(1, 2, 16), ctx.ones(1, 16, 16), activation=v),
    "out_dtype": lambda ctx, v: grouped_mm(ctx.ones(1, 2, 16), ctx.ones(1, 16, 16), out_dtype=v),
    "eps": lambda ctx, v: ctx.ops.all_reduce_rms_norm(ctx.ones(2, 4), ctx.ones(2, 4), ctx.ones(4), v),
    "num_experts": lambda ctx, v: of_experts(ctx, num_experts=v),
    "hidden": lambda ctx, v: of_experts(ctx, hidden=v),
    "max_tokens": lambda ctx, v: of_experts(ctx, max_tokens=v),
    "top_k": lambda ctx, v: of_experts(ctx, top_k=v),
    "a dtype of rows": lambda ctx, v: of_experts(ctx, dtype=v),
    "a group of experts": lambda ctx, v: of_experts(ctx, group=v),
    "the config of experts": lambda ctx, v: of_experts(ctx, config=v),
    "tokens": lambda ctx, v: of_experts(ctx).dispatch(v, torch.zeros(4, 2, dtype=torch.int64, device=ctx.device)),
    "topk_ids": lambda ctx, v: of_experts(ctx).dispatch(ctx.ones(4, 8), v),
    "a layout of rows": lambda ctx, v: dispatched(of_experts(ctx), layout=v),
    "rows": lambda ctx, v: (ep := of_experts(ctx)).combine(v, dispatched(ep)),
    "received": lambda ctx, v: of_experts(ctx).combine(ctx.ones(4, 8), v),
    "the experts of a layer": lambda ctx, v: layer_of_experts(ctx, experts=v),
    "the weights of a layer": lambda ctx, v: layer_of_experts(ctx, w_up=v),
    "the activation of a layer": lambda ctx, v: layer_of_experts(ctx, activation=v),
    "max_events": lambda ctx, v: ctx.tracing.enable(v),
    "fn": lambda ctx, v: iris.do_bench(v, n_repeat=1),
    "barrier_fn": lambda ctx, v: iris.do_bench(int, v, n_repeat=1),
    "n_warmup": lambda ctx, v: iris.do_bench(int, n_warmup=v, n_repeat=1),
    "n_repeat": lambda ctx, v: iris.do_bench(int, n_repeat=v),
    "quantiles": lambda ctx, v: iris.do_bench(int, n_repeat=1, quantiles=v),
    "return_mode": lambda ctx, v: iris.do_bench(int, n_repeat=1, return_mode=v),
    "Config": lambda ctx, v: [Config(**{name: v}) for name in Config.__dataclass_fields__],
    "ExpertsConfig": lambda ctx, v: [ExpertsConfig(**{name: v}) for name in ExpertsConfig.__dataclass_fields__],
    "FusedConfig": lambda ctx, v: [FusedConfig(**{name: v}) for name in FusedConfig.__dataclass_fields__],
}
NOTHING = {"None"}
INTEGERS = {"numpy's integer", "a tensor's integer"}
NUMBERS = INTEGERS | {
    "a float", "True", "NaN", "infinity", "negative", "2**31", "2**63", "2**70", "numpy's float", "a tensor's float",
    "a tensor's bool",
}  # fmt: skip
# The kinds of values that each takes.
TAKEN = {
    "eps": NUMBERS,
    "fn": {"a type"},
    "barrier_fn": {"a type"},
    "a displacement": INTEGERS | {"True"},
    "quantiles": NOTHING | {"an empty list"},
}
TAKEN |= dict.fromkeys(("scale_a", "activation", "out_dtype", "the activation of a layer"), NOTHING)
TAKEN |= dict.fromkeys(("num_experts", "hidden", "max_tokens"), INTEGERS)
TAKEN |= dict.fromkeys(("heap_size", "max_events", "n_warmup", "n_repeat"), INTEGERS)
TAKEN |= {
    name: NOTHING
    for name in HERE
    if name in ("process_group", "config", "workspace", "Config", "communicator()", "release_graphs()")
    or "group" in name or "barrier()" in name or "product" in name
    or name == "the config of experts"
}  # fmt: skip


def is_this_rank(value):
    """Under torchrun the numbers of the ranks in the world go on beyond the one rank of the context."""
    try:
        return dist.is_initialized() and operator.index(value) == dist.get_rank()
    except (TypeError, RuntimeError):
        return False


# These would take it, and for long.
ENDLESS = {(name, "2**31") for name in ("heap_size", "max_events", "n_warmup", "n_repeat")}


@pytest.mark.parametrize("argument", HERE)
def test_other_calls_refuse_in_words_of_their_own(ctx, argument):
    """Whatever they are given: an error of Iris, or it is what the call is said to take."""
    for kind, value in VALUES.items():
        if (argument, kind) in ENDLESS or (argument in ("src", "dst") and is_this_rank(value)):
            continue
        try:
            HERE[argument](ctx, value)
        except IrisError as error:
            assert len(str(error)) > 40, f"{argument}: {kind}: {error}"
            assert kind not in TAKEN.get(argument, ()), f"{argument}: {kind}: {error}"
        except Exception as error:
            pytest.fail(f"{argument}: {kind} ends in {error!r}")
        else:
            assert kind in TAKEN.get(argument, ()), f"{argument}: {kind} is taken"


@pytest.mark.parametrize("argument", HERE)
def test_errors_show_a_part_of_what_is_long(ctx, argument):
    """With dots in the place of the rest, or they do not show it."""
    for value in ("0123456789" * 50, list(range(500))):
        try:
            HERE[argument](ctx, value)
        except IrisError as error:
            text = str(error)
            assert "..." in text or not any(part in text for part in ("0123456789", "0, 1, 2, 3")), text
            assert len(text) < 600, text
