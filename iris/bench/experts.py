"""Dispatch and combine side by side: Iris, and torch.distributed's all_to_all_single with exact counts.

Each rank has as many tokens, and each token goes to ``top_k`` of the experts, drawn at random, and comes back; what the
experts would do is left out. torch's way sends a row for each choice, puts rows by expert, and has the host wait for
the counts, so no graph can capture it. All in one run, on the same data. Each result is checked once before it is
timed, with experts that turn the sign of their rows or do not: a row that comes to another expert shows.

``link_GBps`` is what the busiest rank has to send at least, a row for each other rank of a token's experts there and
one back, over the time in a graph.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from iris.bench.collectives import microseconds
from iris.bench.ranks import failure, on_any_rank
from iris.bench.timing import do_bench
from iris.context import Iris
from iris.experts import ExpertParallel, ExpertsConfig, Received
from iris.experts.rows import GROUP

# "iris fp8": rows are sent as fp8, with a scale for each 128 elements, and come back in the dtype.
FP8 = "iris fp8"
LIBRARIES = ("iris", FP8, "torch")
LAYOUTS = ("expanded", "compact")
# Calls that are timed together on a GPU, outside of graphs.
CALLS = 20


class Shape(NamedTuple):
    """Of a layer: tokens of each rank, elements of a row, experts of all ranks, and how many of them a token has."""

    tokens: int
    hidden: int
    num_experts: int
    top_k: int


class Row(NamedTuple):
    """One measurement of a dispatch and a combine. ``sms``: 0 where the library chooses.

    ``graph_microseconds``: in a CUDA graph; none where it cannot be captured. ``call_microseconds``: `CALLS` calls, one
    after the other, over their number: with the host's time, and a rank that begins late counts but once.
    """

    tokens: int
    hidden: int
    num_experts: int
    top_k: int
    dtype: str
    layout: str
    sms: int
    library: str
    graph_microseconds: float | None
    call_microseconds: float | None
    link_GBps: float | None
    reason: str = ""


class Routed(NamedTuple):
    """Tokens of a rank: ``x [T, H]``, ``ids [T, K]`` int64, ``weights [T, K]`` float32."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def route(shape: Shape, rank: int, dtype: torch.dtype, device: torch.device) -> Routed:
    """Random tokens of a rank, the same on all ranks that ask."""
    generator = torch.Generator(device).manual_seed(rank)
    scores = torch.randn(shape.tokens, shape.num_experts, generator=generator, device=device)
    weights, ids = scores.softmax(dim=1).topk(shape.top_k)
    x = torch.randn(shape.tokens, shape.hidden, generator=generator, device=device, dtype=dtype)
    return Routed(x, ids, weights / weights.sum(dim=1, keepdim=True))


def signs(num_experts: int, device: torch.device) -> torch.Tensor:
    """What experts multiply their rows by where a result is checked: 1 or -1, by the bits of their numbers."""
    return torch.tensor([1.0 - 2 * (expert.bit_count() % 2) for expert in range(num_experts)], device=device)


def row_bytes(shape: Shape, dtype: torch.dtype, library: str) -> tuple[int, int]:
    """Bytes of a row there, with its scales if it is fp8, and back."""
    wide = shape.hidden * dtype.itemsize
    return (shape.hidden + -(-shape.hidden // GROUP) * 4 if library == FP8 else wide), wide


def link_bytes(shape: Shape, num_ranks: int, dtype: torch.dtype, device: torch.device, library: str) -> int:
    """What the busiest rank sends to others: of its own tokens a row for each rank of experts, and as many back."""
    local = shape.num_experts // num_ranks
    rows = torch.zeros(num_ranks, num_ranks, dtype=torch.int64)
    for rank in range(num_ranks):
        owners = route(shape, rank, dtype, device).ids // local
        rows[rank] = torch.stack([(owners == peer).any(dim=1).sum() for peer in range(num_ranks)]).cpu()
    rows.fill_diagonal_(0)
    there, back = row_bytes(shape, dtype, library)
    return int((rows.sum(dim=1) * there + rows.sum(dim=0) * back).max())


Apply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""What experts do: their results, from rows by expert and from how many rows each has of each rank, ``[W, E / W]``."""


def as_they_are(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return rows


class ByTorch:
    """torch.distributed's way, as training libraries have it. ``apply``: what the experts do."""

    def __init__(self, num_ranks: int, num_experts: int, device: torch.device, apply: Apply = as_they_are) -> None:
        self._num_ranks, self._num_experts, self._apply = num_ranks, num_experts, apply
        self._expert_of = torch.arange(num_experts // num_ranks, device=device).repeat(num_ranks)

    def __call__(self, routed: Routed) -> torch.Tensor:
        """The result of a dispatch and a combine. The host waits for the counts in between."""
        x, ids, weights = routed
        chosen = ids.flatten()
        by_expert = chosen.argsort(stable=True)
        sent = x[by_expert // ids.shape[1]]
        counts = torch.zeros(self._num_experts, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        there, here = torch.stack((counts, theirs)).view(2, self._num_ranks, -1).sum(dim=2).tolist()
        received = x.new_empty(sum(here), x.shape[1])
        dist.all_to_all_single(received, sent, here, there)
        # By rank and then by expert, while a grouped GEMM takes those of an expert together.
        grouping = self._expert_of.repeat_interleave(theirs, output_size=len(received)).argsort(stable=True)
        received[grouping] = self._apply(received[grouping], theirs.view(self._num_ranks, -1))
        dist.all_to_all_single(sent, received, there, here)
        pairs = torch.empty_like(sent)
        pairs[by_expert] = sent
        return torch.bmm(weights.to(x.dtype)[:, None, :], pairs.view(*ids.shape, -1)).squeeze(1)


def measure(
    ctx: Iris,
    shapes: Sequence[Shape],
    layouts: Sequence[str],
    sms: Sequence[int],
    libraries: Sequence[str],
    dtype: torch.dtype,
    low_latency: bool | None = None,
) -> Iterator[Row]:
    """All rows, as they come. Collective over the world; the rows are the same on all ranks.

    ``low_latency``: of `ExpertsConfig`.
    """
    ctx.device_barrier()
    for shape in shapes:
        routed = route(shape, ctx.cur_rank, dtype, ctx.device)
        if "torch" in libraries:
            yield _by_torch(ctx, shape, routed)
        for library, layout, count in itertools.product(libraries, layouts, sms):
            if library != "torch":
                yield _by_iris(ctx, shape, layout, count, library, routed, low_latency)
                ctx.barrier()


def _by_torch(ctx: Iris, shape: Shape, routed: Routed) -> Row:
    own = signs(shape.num_experts, ctx.device).chunk(ctx.num_ranks)[ctx.cur_rank]

    def turn(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return rows * own.to(rows.dtype).repeat_interleave(counts.sum(0))[:, None]

    call, checked = (
        functools.partial(ByTorch(ctx.num_ranks, shape.num_experts, ctx.device, apply), routed)
        for apply in (as_they_are, turn)
    )
    return _row(ctx, shape, "", 0, "torch", call, checked, routed)


def _by_iris(
    ctx: Iris, shape: Shape, layout: str, sms: int, library: str, routed: Routed, low_latency: bool | None
) -> Row:
    config = ExpertsConfig(in_flight=1, layouts=(layout,), num_sms=sms or None, low_latency=low_latency)
    x, ids, weights = routed
    layer: ExpertParallel | None = None
    try:
        layer = ctx.experts(
            num_experts=shape.num_experts,
            hidden=shape.hidden,
            max_tokens=shape.tokens,
            top_k=shape.top_k,
            dtype=x.dtype,
            config=config,
        )
    except (RuntimeError, ValueError) as error:
        reason = failure(error)
    else:
        reason = ""
    if reason := on_any_rank(ctx, reason):
        if layer is not None:
            layer.close()
        return Row(*shape, _name(x.dtype), layout, sms, library, None, None, None, reason)
    assert layer is not None
    out, quantize = torch.empty_like(x), "fp8_block128" if library == FP8 else None
    made: torch.Tensor | None = None

    def call() -> torch.Tensor:
        nonlocal made
        received = layer.dispatch(x, ids, weights, layout=layout, quantize=quantize)
        if made is None:
            # What experts would make of them. The same rows come in each call.
            made = widened(received, x.dtype)
        return layer.combine(made, received, out=out)

    def checked() -> torch.Tensor:
        received = layer.dispatch(x, ids, weights, layout=layout, quantize=quantize)
        turned = widened(received, x.dtype)
        own = signs(shape.num_experts, x.device).chunk(ctx.num_ranks)[ctx.cur_rank]
        for there, sign in zip(rows_of_experts(received), own, strict=True):
            turned.flatten(0, -2)[there] *= sign
        return layer.combine(turned, received, out=out)

    row = _row(ctx, shape, layout, sms, library, call, checked, routed)
    ctx.barrier()
    layer.close()
    return row


def _row(
    ctx: Iris,
    shape: Shape,
    layout: str,
    sms: int,
    library: str,
    call: Callable[[], torch.Tensor],
    checked: Callable[[], torch.Tensor],
    routed: Routed,
) -> Row:
    """``checked``: the call with experts that multiply their rows by `signs`."""
    x = routed.x
    try:
        reason = _problem(checked(), routed, signs(shape.num_experts, x.device))
        call()
    except Exception as error:  # a peer's failure is a result too
        reason = failure(error)
    in_graph: float | None = None
    one_by_one: float | None = None
    rate: float | None = None
    if not (reason := on_any_rank(ctx, reason)):
        calls, repeats = (CALLS, (1, 5)) if ctx.device.type == "cuda" else (1, (0, 1))

        def in_a_row() -> None:
            for _ in range(calls):
                call()

        milliseconds = do_bench(in_a_row, ctx.barrier, n_warmup=repeats[0], n_repeat=repeats[1], return_mode="median")
        mine = 1e3 * milliseconds / calls
        one_by_one = max(ctx.broadcast(mine, rank) for rank in range(ctx.num_ranks))
        if library != "torch" and ctx.device.type == "cuda":
            moved = link_bytes(shape, ctx.num_ranks, x.dtype, ctx.device, library)
            in_graph = microseconds(ctx, call, moved)
            rate = moved / in_graph / 1e3
    return Row(*shape, _name(x.dtype), layout, sms, library, in_graph, one_by_one, rate, reason)


def widened(received: Received, dtype: torch.dtype) -> torch.Tensor:
    """The rows; of fp8, times their scales. Rows that nobody wrote are not read."""
    if received.scales is None:
        return received.rows
    made = torch.zeros(received.rows.shape, dtype=dtype, device=received.rows.device)
    rows, scales, to = received.rows.flatten(0, -2), received.scales.flatten(0, -2), made.flatten(0, -2)
    for there in rows_of_experts(received):
        of_elements = scales[there].repeat_interleave(GROUP, dim=1)[:, : rows.shape[1]]
        to[there] = (rows[there].float() * of_elements).to(dtype)
    return made


def rows_of_experts(received: Received) -> list[slice]:
    """Which rows each of this rank's experts has. The host waits for their numbers."""
    numbers = zip(received.offsets.tolist(), received.counts.tolist(), strict=False)
    return [slice(first, first + count) for first, count in numbers]


def _problem(out: torch.Tensor, routed: Routed, turned: torch.Tensor) -> str:
    """What is wrong with a result, in words: it is x times the sum of its weights, each ``turned`` as its expert does.

    ``turned``: `signs`.
    """
    x, weights = routed.x.float(), routed.weights
    worst = (out.float() - x * (weights * turned[routed.ids]).sum(dim=1, keepdim=True)).abs().max().item()
    # Of rows that are not turned, as those of two experts may leave next to nothing of each other.
    largest = (x * weights.sum(dim=1, keepdim=True)).abs().max().item()
    return "" if worst <= 0.08 * largest else f"wrong result: differs by {worst:.3g}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
