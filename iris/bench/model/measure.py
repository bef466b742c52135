"""A decoder's steps, prompts and training steps, with each way of communicating, in one run on the same weights.

A time is the median by turns with the other ways, of the ranks the slowest: of replays of a CUDA graph of one step, or
of one pass over prompts. Of training steps several are enqueued one after the other, as by a program that
does not look at each loss; the time is that of one. Logits, or gradients, of each way are compared with those
of one process, which computes the same in a wider dtype from the same rounded weights.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from iris.bench.collectives import microseconds_of_each, ready
from iris.bench.model.cases import Case, Compared, Inputs, compare, inputs, logits, of_one_process
from iris.bench.model.communication import ByTorch, Communication
from iris.bench.model.decoder import Compiler, Decoder, Ends
from iris.bench.model.dimensions import Dimensions, Share
from iris.bench.model.training import Trainer, compare_gradients
from iris.bench.model.ways import FLOOR, WAYS
from iris.bench.model.weights import Maker
from iris.bench.ranks import failure, on_any_rank
from iris.bench.repetitions import Repetitions
from iris.context import Iris

# Of a way, and of one process in the dtype; none where nothing is compared.
Errors = tuple[float | None, float | None]
# One step or pass is a graph; of training steps several are enqueued one after the other.
OFTEN, TRAINING = Repetitions(1, 25, 10), Repetitions(4, 7, 2)
# Layers of the model whose gradients are compared: one process has those of all parameters at once.
COMPARED_LAYERS = 2


class Row(NamedTuple):
    """One measurement.

    ``error``: the largest of a sequence's logits, or of a parameter's gradient, relative to what one process has in a
    wider dtype, as a root of mean squares; none where nothing is compared. ``error_of_one``: that of one process in the
    dtype. ``microseconds``: none where the reason is given.
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
    error_of_one: float | None
    reason: str = ""


class Measured(Protocol):
    """What is done with a case, by one way and another."""

    often: Repetitions

    def compare(self, way: str, by: Communication) -> Compared:
        """The errors of a way. Collective."""

    def call(self, way: str, by: Communication) -> object:
        """What is timed. Collective."""

    def ready(self, call: Callable[[], object]) -> Any:
        """What `microseconds_of_each` takes."""


class Inference:
    """A step of decoding, or a pass over prompts: one CUDA graph."""

    often = OFTEN

    def __init__(self, ctx: Iris, case: Case, maker: Maker, decoders: "Decoders") -> None:
        self._ctx, self._case, self._decoders = ctx, case, decoders
        self._of_one, self._exact = of_one_process(case, maker)
        given = inputs(case, maker)
        self._inputs: Inputs = given._replace(caches=list(given.caches))

    def call(self, way: str, by: Communication) -> Tensor:
        return logits(self._case, self._decoders.of(way), self._inputs, by)

    def compare(self, way: str, by: Communication) -> Compared:
        return compare(self.call(way, by), self._of_one, self._exact)

    def ready(self, call: Callable[[], object]) -> Any:
        return ready(self._ctx, call, self.often)


class Training:
    """A step of training, called as it is; its gradients are compared in a model of `COMPARED_LAYERS` layers."""

    often = TRAINING

    def __init__(self, ctx: Iris, case: Case, maker: Maker, decoders: "Decoders") -> None:
        self._ctx, self._maker, self._decoders = ctx, maker, decoders
        self._given = inputs(case, maker)
        self._trainer = Trainer(decoders.plain)

    def call(self, way: str, by: Communication) -> Tensor:
        decoder, given = self._decoders.of(way), self._given
        return self._trainer.step(decoder, given.tokens, rotation=given.rotation, by=by)

    def compare(self, way: str, by: Communication) -> Compared:
        d = self._maker.dimensions
        small = self._maker.of(dimensions=d._replace(layers=min(COMPARED_LAYERS, d.layers)))
        return compare_gradients(small, Decoders(small).of(way), self._given, by)

    def ready(self, call: Callable[[], object]) -> Any:
        return _Called(self._ctx, call, self.often.per_graph) if self._ctx.device.type == "cuda" else call


class _Called:
    """Calls one after the other, which are timed as a graph of them is."""

    def __init__(self, ctx: Iris, call: Callable[[], object], number: int) -> None:
        self._ctx, self._call, self._number = ctx, call, number

    def replay(self) -> None:
        self._ctx.device_barrier()
        for _ in range(self._number):
            self._call()


class Decoders:
    """One model, as it is and by each compiler, with the same weights."""

    def __init__(self, maker: Maker) -> None:
        self._maker, self.plain = maker, maker.decoder()
        self._by_compiler: dict[Compiler | None, Decoder] = {None: self.plain}

    def of(self, way: str) -> Decoder:
        compiler, plain = WAYS[way].compiler, self.plain
        if compiler not in self._by_compiler:
            ends = Ends(plain.embedding, plain.gain, plain.head)
            decoder = Decoder(self._maker.dimensions, ends, list(plain.layers), self._maker.share, compiler)
            self._by_compiler[compiler] = decoder
        return self._by_compiler[compiler]


def measure(
    ctx: Iris, model: str, dimensions: Dimensions, cases: Sequence[Case], ways: Sequence[str], dtype: torch.dtype
) -> Iterator[Row]:
    """All rows, as they come; those of training are last, which changes the weights.

    Collective over the world; the rows are the same on all ranks.
    """
    ctx.device_barrier()
    maker = Maker(dimensions, Share(ctx.cur_rank, ctx.num_ranks), dtype, dtype, ctx.device)
    decoders = Decoders(maker)
    by = {way: WAYS[way].communication(ctx) for way in ways}
    try:
        for case in sorted(cases, key=lambda case: case.mode == "train"):
            kind = Training if case.mode == "train" else Inference
            suitable = {way: each for way, each in by.items() if WAYS[way].suits(case.mode, dimensions)}
            experts_memory = dimensions, case.tokens_of_rank(ctx.num_ranks), dtype
            found = _side_by_side(ctx, kind(ctx, case, maker, decoders), suitable, experts_memory)
            ctx.ops.close()
            ctx.ccl.release_graphs()
            # Dynamo compiles a function for a few shapes only (torch._dynamo.config.recompile_limit) and then refuses.
            torch.compiler.reset()
            ctx.barrier()
            for way, (spent, errors, reason) in found.items():
                speed = None if spent is None else 1e6 * case.tokens / spent
                name = str(dtype).removeprefix("torch.")
                yield Row(model, dimensions.layers, *case, name, way, spent, speed, *errors, reason)
    finally:
        for communication in by.values():
            if isinstance(communication, ByTorch):
                communication.close()


def _largest(ctx: Iris, errors: Errors) -> Errors:
    """Of all ranks, each of which has its part of gradients. Collective."""
    of_ranks = [ctx.broadcast(errors, rank) for rank in range(ctx.num_ranks)]
    error, error_of_one = (
        max((each for each in kind if each is not None), default=None) for kind in zip(*of_ranks, strict=True)
    )
    return error, error_of_one


class _Found(NamedTuple):
    microseconds: float | None
    errors: Errors
    reason: str


def _side_by_side(
    ctx: Iris, measured: Measured, by: dict[str, Communication], experts_memory: tuple[Dimensions, int, torch.dtype]
) -> dict[str, _Found]:
    """What is found of a case, by way. ``experts_memory``: what `Communication.prepare` takes.

    A function of its own, so that its tensors and graphs are gone when it returns.
    """
    errors: dict[str, Errors] = {}
    reasons: dict[str, str] = {}
    readied: dict[str, Any] = {}
    for way, communication in by.items():

        def call(way: str = way, communication: Communication = communication) -> object:
            return measured.call(way, communication)

        errors[way], reason = (None, None), ""
        try:
            communication.prepare(*experts_memory)
            if way != FLOOR or ctx.num_ranks == 1:
                error, error_of_one, reason = measured.compare(way, communication)
                errors[way] = error, error_of_one
            call()
        except Exception as problem:  # of a library's on this machine, which is a result too
            reason = failure(problem)
        # One rank's failure is everybody's, so that all go on with the same way.
        reasons[way], errors[way] = on_any_rank(ctx, reason), _largest(ctx, errors[way])
        if not reasons[way]:
            readied[way] = measured.ready(call)
    times = microseconds_of_each(ctx, list(readied.values()), measured.often) if readied else []
    spent = dict(zip(readied, times, strict=True))
    return {way: _Found(spent.get(way), errors[way], reason) for way, reason in reasons.items()}
