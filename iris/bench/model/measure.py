"""A decoder's steps and prompts, with each way of communicating, on the same weights and data, in one run.

A time is the median over replays of a CUDA graph of one step, or of one pass over prompts, by turns with those of the
other ways; of the ranks the slowest counts. Logits of each way are compared with those of one process, which computes
the same model in a wider dtype from the same rounded weights. The largest error of a sequence's logits, relative to
them, may be twice that of one process in the dtype itself.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from iris.bench.collectives import microseconds_of_each, ready
from iris.bench.model.communication import Alone, Communication
from iris.bench.model.decoder import Decoder, Rotation, rotations
from iris.bench.model.dimensions import Dimensions, Share
from iris.bench.model.ways import FLOOR, WAYS, compiled
from iris.bench.model.weights import Maker
from iris.bench.ranks import failure, on_any_rank
from iris.bench.repetitions import Repetitions
from iris.context import Iris

MODES = ("decode", "prefill")
# One step or pass is a graph.
OFTEN = Repetitions(1, 25, 10)
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
TOKENS = 4_000_000  # the seed of tokens


class Case(NamedTuple):
    """What is measured. ``sequences`` of ``context`` tokens: prompts, or caches whose last token a step adds."""

    mode: str
    sequences: int
    context: int

    @property
    def tokens(self) -> int:
        """That one call takes in."""
        return self.sequences * (self.context if self.mode == "prefill" else 1)

    def problem(self, num_ranks: int) -> str:
        """Why so many ranks cannot share it, in words; empty if they can."""
        if self.mode == "prefill" and self.tokens % num_ranks:
            return f"{num_ranks} ranks cannot share the {self.tokens} tokens of {self.sequences} prompts"
        return ""


class Row(NamedTuple):
    """One measurement.

    ``error``: the largest of a sequence's logits, relative to what one process has in a wider dtype, as a root of mean
    squares; none where nothing is compared. ``error_of_one``: that of one process in the dtype. ``microseconds``: none
    where the reason is given.
    """

    model: str
    layers: int
    mode: str
    sequences: int
    context: int
    dtype: str
    way: str
    microseconds: float | None
    tokens_per_second: float | None
    error: float | None
    error_of_one: float
    reason: str = ""


class Inputs(NamedTuple):
    """Of a case, the same on all ranks; ``caches`` are a rank's part."""

    tokens: Tensor
    positions: Tensor
    caches: Any
    rotation: Rotation


def inputs(case: Case, maker: Maker) -> Inputs:
    device, dimensions = maker.device, maker.dimensions
    generator = torch.Generator(device).manual_seed(TOKENS + case.sequences)
    prefill = case.mode == "prefill"
    shape = (case.sequences, case.context) if prefill else (case.sequences,)
    tokens = torch.randint(dimensions.vocabulary, shape, generator=generator, device=device)
    positions = torch.full((case.sequences,), case.context - 1, device=device)
    caches = (maker.empty_caches if prefill else maker.full_caches)(case.sequences, case.context)
    return Inputs(tokens, positions, caches, rotations(dimensions, case.context, maker.dtype, device))


@torch.no_grad()
def logits(case: Case, decoder: Decoder, given: Inputs, by: Communication) -> Tensor:
    if case.mode == "prefill":
        return decoder.prefill(given.tokens, caches=given.caches, rotation=given.rotation, by=by)
    return decoder.decode(given.tokens, given.positions, caches=given.caches, rotation=given.rotation, by=by)


def of_one_process(case: Case, dimensions: Dimensions, rounded: torch.dtype, dtype: torch.dtype, device: Any) -> Tensor:
    """The logits of a case, computed by this process alone in ``dtype``, layer by layer."""
    maker = Maker(dimensions, Share(), rounded, dtype, device)
    return logits(case, maker.one_by_one(), inputs(case, maker), Alone())


class Compared(NamedTuple):
    """Errors of logits, and what is wrong with them, in words, if anything is: as `Row` has them."""

    error: float
    error_of_one: float
    reason: str


def compare(result: Tensor, of_one: Tensor, exact: Tensor) -> Compared:
    """``[sequences, vocabulary]`` of the ranks, and of one process in the same dtype and in a wider one."""

    def largest(logits: Tensor) -> float:
        squares = (logits.to(exact.dtype) - exact).square().mean(1) / exact.square().mean(1)
        return squares.sqrt().max().item()

    error, error_of_one = largest(result), largest(of_one)
    allowed = 2 * error_of_one + torch.finfo(result.dtype).eps
    wrong = f"wrong result: an error of {error:.3g}, and {allowed:.3g} is allowed"
    return Compared(error, error_of_one, "" if error <= allowed else wrong)


def measure(
    ctx: Iris, model: str, dimensions: Dimensions, cases: Sequence[Case], ways: Sequence[str], dtype: torch.dtype
) -> Iterator[Row]:
    """All rows, as they come. Collective over the world; the rows are the same on all ranks."""
    ctx.device_barrier()
    maker = Maker(dimensions, Share(ctx.cur_rank, ctx.num_ranks), dtype, dtype, ctx.device)
    decoders = {False: maker.decoder()}
    if any(WAYS[way].compiled for way in ways):
        plain = decoders[False]
        decoders[True] = Decoder(dimensions, plain.ends, list(plain.layers), maker.share, compiled)
    by = {way: WAYS[way].communication(ctx) for way in ways}
    for case in cases:
        # Whose tensors and graphs are gone when it returns.
        found = _side_by_side(ctx, case, maker, decoders, by)
        ctx.ops.close()
        ctx.ccl.release_graphs()
        ctx.barrier()
        for way, (spent, error, error_of_one, reason) in found.items():
            speed = None if spent is None else 1e6 * case.tokens / spent
            name = str(dtype).removeprefix("torch.")
            yield Row(model, dimensions.layers, *case, name, way, spent, speed, error, error_of_one, reason)


def _side_by_side(
    ctx: Iris, case: Case, maker: Maker, decoders: dict[bool, Decoder], by: dict[str, Communication]
) -> dict[str, tuple]:
    """Of each way: microseconds, error, that of one process, and the reason where there is no time."""
    of_one, exact = (
        of_one_process(case, maker.dimensions, maker.dtype, dtype, ctx.device)
        for dtype in (maker.dtype, WIDER[maker.dtype])
    )
    error_of_one = compare(of_one, of_one, exact).error
    given = inputs(case, maker)
    given = given._replace(caches=list(given.caches))
    errors: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    readied: dict[str, Any] = {}
    for way, communication in by.items():
        decoder, error, reason = decoders[WAYS[way].compiled], None, ""

        def call(decoder: Decoder = decoder, communication: Communication = communication) -> Tensor:
            return logits(case, decoder, given, communication)

        try:
            result = call()
            if way != FLOOR or ctx.num_ranks == 1:
                error, _, reason = compare(result, of_one, exact)
        except Exception as problem:  # of a library's on this machine, which is a result too
            reason = failure(problem)
        # One rank's failure is everybody's, so that all go on with the same way.
        reasons[way] = on_any_rank(ctx, reason)
        errors[way] = error
        if not reasons[way]:
            readied[way] = ready(ctx, call, OFTEN)
    times = microseconds_of_each(ctx, list(readied.values()), OFTEN) if readied else []
    spent = dict(zip(readied, times, strict=True))
    return {way: (spent.get(way), errors[way], error_of_one, reason) for way, reason in reasons.items()}
