"""How the tests call each collective, and what must come out of it: a local computation from everybody's data."""

import contextlib
import hashlib
import random
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from covering import EVERYTHING, RANKS, SAMPLED
from patterns import assert_same_bits, pattern

from iris.ccl import Config, ReduceOp
from iris.ccl.algorithms import choose_algorithm
from iris.ccl.pull import IN_FLIGHT
from iris.ccl.select import Choice

MOVES = ["all_gather", "all_to_all", "all_to_all_v", "broadcast", "gather", "scatter", "send"]
SUMS = ["all_reduce", "reduce_scatter", "reduce"]
ORDERS = ["contiguous", "sliced", "transposed", "stepped"]
LAYOUTS = [*ORDERS, "mixed"]  # mixed: another one on each rank, and for input and output
PLACES = ["heap", "unaligned", "elsewhere", "mixed"]

# Ways of sums in which peers access tensors where they lie. A program of the first claims half of a block, where all
# blocks are more than so many bytes.
ON_THE_HEAP = {
    "pulled by half blocks": ("pull", 0),
    "pulled by blocks": ("pull", IN_FLIGHT),
    "pushed": ("two_shot_direct", IN_FLIGHT),
}

GUARD = 16  # elements before and after each tensor that must stay as they are


@dataclass(frozen=True)
class Case:
    """One call. ``shape`` is that of a rank's piece; ``root`` and ranks count within the group."""

    collective: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    input_place: str = "heap"
    output_place: str = "heap"
    layout: str = "contiguous"
    in_place: bool = False
    config: tuple[tuple[str, object], ...] = ()


@dataclass
class Arena:
    """A piece of the heap from which a round's tensors are cut, at other offsets on each rank."""

    memory: torch.Tensor
    used: int = 0
    configs: dict = field(default_factory=dict)

    def reset(self, rank):
        self.used = 4096 * (rank + 1)

    def cut(self, count, dtype, place):
        size = count * dtype.itemsize
        if place == "elsewhere":
            return torch.empty(count, dtype=dtype, device=self.memory.device)
        begin = self.used + (dtype.itemsize if place == "unaligned" else 0)
        self.used = -(-(begin + size) // 1024) * 1024
        return self.memory[begin : begin + size].view(dtype)


class Frame:
    """A tensor of the wished layout inside a larger buffer, and what the buffer should hold afterwards."""

    def __init__(self, arena, shape, dtype, place, layout, rank, call):
        padded, index = list(shape), (...,)
        if layout == "mixed":
            layout = ORDERS[(rank + call // 1000) % len(ORDERS)]
        if not shape:
            layout = "contiguous"
        elif layout == "sliced":
            padded[-1] += 3
            index = (..., slice(1, -2))
        elif layout == "stepped":
            padded[-1] *= 2
            index = (..., slice(None, None, 2))
        elif layout == "transposed":
            padded.reverse()
        count = torch.Size(padded).numel()
        self.buffer = arena.cut(count + 2 * GUARD, dtype, place)
        self.buffer.copy_(pattern(self.buffer.shape, dtype, rank, call))
        inner = self.buffer[GUARD : GUARD + count].view(padded)
        self.tensor = inner.permute(*reversed(range(len(shape)))) if layout == "transposed" else inner[index]
        assert self.tensor.shape == torch.Size(shape)

    def check_the_rest(self, before, result):
        """Only ``result`` may differ from ``before``, a copy of the buffer; it may be elsewhere, or None."""
        if result is not None and result.untyped_storage().data_ptr() == self.buffer.untyped_storage().data_ptr():
            inside = result.storage_offset() - self.buffer.storage_offset()
            if 0 <= inside < self.buffer.numel():
                before.as_strided(result.shape, result.stride(), inside).copy_(result)
        assert_same_bits(self.buffer, before)


@contextlib.contextmanager
def chosen(ctx, variant):
    """Calls that could be carried out by ``variant`` are, whatever their size; and there is such a call."""
    comm = ctx.ccl.communicator()
    table, used = comm.table, set()

    def choose(call):
        algorithm, programs = choose_algorithm(call)
        used.add(algorithm.name)
        return algorithm, programs

    comm.table = {name: [Choice(None, variant, None), *rows] for name, rows in table.items()}
    comm.forget()
    try:
        with patch("iris.ccl.algorithms.choose_algorithm", choose):
            yield
        # Among one rank there may be nothing to choose.
        assert variant in used or ctx.num_ranks == 1, f"no call went by {variant}, but by {used}"
    finally:
        comm.table = table
        comm.forget()


def data(shape, dtype, rank, call, op=None):
    """A rank's input: random bits, or, for a reduction, numbers that leave room for the sum and the product of all."""
    if op is None or dtype == torch.bool or not (dtype.is_floating_point or dtype.is_complex):
        return pattern(shape, dtype, rank, call)
    parts = (*shape, 2) if dtype.is_complex else shape
    generator = torch.Generator().manual_seed(7919 * call + rank + 1)
    values = (torch.rand(parts, generator=generator, dtype=torch.float64) + 0.5) * torch.randint(
        0, 2, parts, generator=generator
    ).mul(2).sub(1)
    return (torch.view_as_complex(values) if dtype.is_complex else values).to(dtype)


def reduced(values, op):
    """The reduction of everybody's ``values``: float64 for floats, exact (or wrapped) for integers."""
    dtype = values[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stack = torch.stack([value.to(wide) for value in values])
    if dtype == torch.bool:
        return stack.amax(0).to(dtype) if op in (ReduceOp.SUM, ReduceOp.MAX) else stack.amin(0).to(dtype)
    total = {
        ReduceOp.SUM: lambda: stack.sum(0),
        ReduceOp.AVG: lambda: stack.mean(0),
        ReduceOp.MIN: lambda: stack.amin(0),
        ReduceOp.MAX: lambda: stack.amax(0),
        ReduceOp.PRODUCT: lambda: stack.prod(0),
    }[op]()
    return total if dtype.is_floating_point or dtype.is_complex else total.to(dtype)


def assert_rounded(actual, expected, ranks):
    """``actual`` is ``expected`` (float64), but for an accumulation in float32 (float64) and one rounding."""
    dtype = actual.dtype
    if dtype.is_complex:
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    if not (dtype.is_floating_point or dtype.is_complex):
        assert_same_bits(actual, expected)
        return
    info = torch.finfo(actual.dtype)
    unit = torch.finfo(torch.float64 if actual.dtype == torch.float64 else torch.float32).eps
    # Every input is below 1.5, so no partial sum exceeds 1.5 a rank; products are bounded by their own size.
    slack = ranks * unit * (1.5 * ranks + expected.abs())
    bound = info.eps / 2 * expected.abs() + info.smallest_normal * info.eps + slack
    actual = actual.to(torch.float64)
    error = (actual - expected).abs()
    wrong = ~((error <= bound) | (actual.isnan() & expected.isnan()) | (actual == expected))
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} are off, by {error[wrong][:3]}, not {bound[wrong][:3]}"
    )


def perform(ctx, arena, case, call, members=None, group=None):
    """Carry out a call on this rank, check its result and that nothing else was written; a digest of the result."""
    members = list(range(ctx.num_ranks)) if members is None else members
    arena.reset(ctx.cur_rank)
    try:
        return _CALLS.get(case.collective, _tensors)(ctx, arena, case, call, members, group)
    except Exception as error:
        raise AssertionError(f"call {call}, ranks {members}, {case}: {error}") from error


def _keywords(arena, case, group):
    # One object for equal choices, as a program has it.
    config = arena.configs.setdefault(case.config, Config(**dict(case.config))) if case.config else None
    return {"group": group, "config": config}


def _place(place, rank, call):
    return ["heap", "unaligned", "elsewhere"][(rank + call) % 3] if place == "mixed" else place


def _times(shape, factor):
    return (factor * shape[0], *shape[1:]) if shape else (factor,)


def _shapes(case, size):
    """Of input and output."""
    shape = case.shape
    if case.collective in ("all_gather", "gather"):
        return shape, _times(shape, size)
    if case.collective in ("reduce_scatter", "scatter"):
        return _times(shape, size), shape
    if case.collective == "all_to_all":
        both = (*shape[:-1], shape[-1] * size) if shape else (size,)
        return both, both
    return shape, shape


def _expected(case, me, inputs):
    """What rank ``me`` of the group gets, from everybody's inputs."""
    name, size = case.collective, len(inputs)
    root = case.root % size
    if name in SUMS:
        total = reduced(inputs, case.op)
        return total if name != "reduce_scatter" else total.reshape(size, -1)[me].reshape(case.shape)
    if name in ("all_gather", "gather"):
        return torch.cat([value.reshape(_times(case.shape, 1)) for value in inputs])
    if name == "all_to_all":
        return torch.cat([value.reshape(*case.shape[:-1], size, -1)[..., me, :] for value in inputs], -1)
    if name == "scatter":
        return inputs[root].reshape(size, -1)[me].reshape(case.shape)
    return inputs[root]


def _tensors(ctx, arena, case, call, members, group):
    name, size, me, rank = case.collective, len(members), members.index(ctx.cur_rank), ctx.cur_rank
    root = case.root % size
    shapes, op = _shapes(case, size), case.op if name in SUMS else None
    inputs = [data(shapes[0], case.dtype, member, call, op) for member in members]
    places = [_place(place, rank, call) for place in (case.input_place, case.output_place)]
    source = Frame(arena, shapes[0], case.dtype, places[0], case.layout, rank, call + 1000)
    target = Frame(arena, shapes[1], case.dtype, places[1], case.layout, rank, call + 2000)
    given, result = source.tensor, target.tensor
    if case.in_place:
        if name in ("reduce_scatter", "scatter"):
            result = given.view(size, *case.shape)[me] if case.shape else given[me]
        elif name in ("all_gather", "gather"):
            given = result.view(size, *case.shape)[me] if case.shape else result[me]
        elif name != "broadcast":
            result = given
    if name == "broadcast":
        given = result
        if me == root:
            given.copy_(inputs[me])
    else:
        given.copy_(inputs[me])
    before = source.buffer.clone(), target.buffer.clone()

    keywords = _keywords(arena, case, group)
    if name in SUMS:
        keywords["op"] = case.op
    rooted = name in ("broadcast", "gather", "scatter", "reduce")
    method = getattr(ctx.ccl, name)
    if name == "broadcast":
        method(result, members[root], **keywords)
    elif name in ("gather", "reduce"):
        method(result if me == root else None, given, members[root], **keywords)
    elif name == "scatter":
        method(result, given if me == root else None, members[root], **keywords)
    else:
        method(result, given, **keywords)

    receives = not rooted or name in ("broadcast", "scatter") or me == root
    if receives:
        expected = _expected(case, me, inputs)
        if name in SUMS:
            assert_rounded(_packed(result).cpu(), expected, size)
        else:
            assert_same_bits(_packed(result), expected)
    for frame, old in zip((source, target), before, strict=True):
        frame.check_the_rest(old, result if receives else None)
    return _digest(result) if receives else None


def _uneven(case, size, call):
    """How many elements rank s has for rank d: from none to all of ``shape``."""
    n = torch.Size(case.shape).numel()
    return [[n * ((s + 2 * d + call) % 4) // 3 for d in range(size)] for s in range(size)]


def _spread(counts, backwards):
    """Where the pieces begin, with gaps, in the order of ranks or backwards; and the elements in all."""
    begins, at = [0] * len(counts), 0
    for rank in reversed(range(len(counts))) if backwards else range(len(counts)):
        begins[rank] = at
        at += counts[rank] + 3
    return begins, at


def _all_to_all_v(ctx, arena, case, call, members, group):
    size, me, rank = len(members), members.index(ctx.cur_rank), ctx.cur_rank
    counts = _uneven(case, size, call)
    send, recv = counts[me], [counts[s][me] for s in range(size)]
    displs, length = _spread(send, backwards=False)
    places, room = _spread(recv, backwards=True)
    source = Frame(arena, (length,), case.dtype, _place(case.input_place, rank, call), "contiguous", rank, call)
    target = Frame(arena, (room,), case.dtype, _place(case.output_place, rank, call), "contiguous", rank, call + 2000)
    source.tensor.copy_(data((length,), case.dtype, rank, call))
    expected, before = target.buffer.clone(), source.buffer.clone()
    for s, (begin, count) in enumerate(zip(places, recv, strict=True)):
        theirs, whole = _spread(counts[s], backwards=False)
        piece = data((whole,), case.dtype, members[s], call)[theirs[me] : theirs[me] + count]
        expected[GUARD + begin : GUARD + begin + count].copy_(piece)
    ctx.ccl.all_to_all_v(target.tensor, source.tensor, send, displs, recv, places, **_keywords(arena, case, group))
    assert_same_bits(target.buffer, expected)
    assert_same_bits(source.buffer, before)
    return _digest(target.tensor)


def _send(ctx, arena, case, call, members, group):
    """Once round the group: each passes its own tensor to the next rank."""
    size, me, rank = len(members), members.index(ctx.cur_rank), ctx.cur_rank
    if size == 1:
        return None
    after, ahead = members[(me + 1) % size], members[(me - 1) % size]
    source = Frame(arena, case.shape, case.dtype, _place(case.input_place, rank, call), case.layout, rank, call + 1000)
    target = Frame(arena, case.shape, case.dtype, _place(case.output_place, rank, call), case.layout, rank, call + 2000)
    source.tensor.copy_(data(case.shape, case.dtype, rank, call))
    before = source.buffer.clone(), target.buffer.clone()
    steps = ["recv", "send"] if me else ["send", "recv"]
    for step in steps:
        if step == "send":
            ctx.ccl.send(source.tensor, after, **_keywords(arena, case, group))
        else:
            ctx.ccl.recv(target.tensor, ahead, **_keywords(arena, case, group))
    assert_same_bits(_packed(target.tensor), data(case.shape, case.dtype, ahead, call))
    source.check_the_rest(before[0], None)
    target.check_the_rest(before[1], target.tensor)
    return _digest(target.tensor)


_CALLS = {"all_to_all_v": _all_to_all_v, "send": _send}


def _packed(tensor):
    return tensor.clone(memory_format=torch.contiguous_format)


def _digest(tensor):
    return hashlib.sha1(_packed(tensor).cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def sample(number, seed, *axes):
    """So many combinations, at random but always the same: each value of an axis about as often as any other.

    Twenty times as many where everything is to be tested; all of them would be tens of thousands. A third as many in
    the simulator's sample.
    """
    number = 20 * number if EVERYTHING else -(-number // 3) if SAMPLED else number
    columns = []
    for position, axis in enumerate(map(list, axes)):
        generator = random.Random(f"{seed} {position}")
        values = [value for _ in range(-(-number // len(axis))) for value in generator.sample(axis, len(axis))]
        columns.append(values[:number])
    return list(zip(*columns, strict=True))


def mainly(*counts):
    """Run a test with these numbers of ranks, and with all others where everything is to be tested."""
    return pytest.mark.ranks(*(RANKS if EVERYTHING else counts))


def filled(ctx, elements, round_=0):
    """Numbers that differ at every position, rank and round."""
    return torch.arange(elements, device=ctx.device) + 1000.0 * (ctx.cur_rank + 1) + round_


def settle(ctx):
    """On a GPU, whose kernels tell it later: when all are over, every rank knows. Each would else go on with some calls
    that others refuse, and wait for them."""
    if ctx.device.type == "cuda":
        torch.cuda.synchronize(ctx.device)
        dist.barrier()
