"""How long a function takes that all ranks call together."""

import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import torch

from iris import simulator
from iris.arg_parser import check_callable, count, real
from iris.errors import InvalidArgumentError, InvalidCountError, InvalidValueError, UnknownChoiceError, short_repr

_MODES: dict[str, Callable[[torch.Tensor], Any]] = {
    "min": lambda times: times.min().item(),
    "max": lambda times: times.max().item(),
    "mean": lambda times: times.mean().item(),
    "median": lambda times: times.median().item(),
    "all": lambda times: times.tolist(),
}


def _nothing() -> None:
    pass


def do_bench(
    fn: Callable[[], Any],
    barrier_fn: Callable[[], Any] = _nothing,
    preamble_fn: Callable[[], Any] = _nothing,
    n_warmup: int = 25,
    n_repeat: int = 100,
    quantiles: list[float] | None = None,
    return_mode: str = "mean",
) -> Any:
    """Milliseconds that ``fn`` takes on this rank: device events on a GPU, the host's clock in the simulator.

    Before each repetition, outside of the time, in the warm-up too: ``barrier_fn`` is called, so that no peer's ``fn``
    is still at work; ``preamble_fn`` is called; the L2 cache is overwritten (on a GPU, not in the warm-up); and
    ``barrier_fn`` is called again, so that the ranks start together.

    Parameters
    ----------
    fn
        What to time.
    barrier_fn
        Called twice before every repetition: ``ctx.barrier``.
    preamble_fn
        Called before every repetition and not timed, for example to clear an output.
    n_warmup
        Repetitions before the timing, 0 or more.
    n_repeat
        Repetitions that are timed, 1 or more.
    quantiles
        If given, these quantiles of the times are returned instead, as a list (a number, for one quantile).
    return_mode
        "mean", "median", "min", "max", or "all" for the list of times. `UnknownChoiceError` for another.
    """
    for name, function in (("fn", fn), ("barrier_fn", barrier_fn), ("preamble_fn", preamble_fn)):
        check_callable(name, function)
    if not isinstance(return_mode, str) or return_mode not in _MODES:
        raise UnknownChoiceError("return_mode", return_mode, _MODES)
    if count(n_warmup, least=0) is None:
        raise InvalidCountError("n_warmup", n_warmup, "repetitions before the timing", least=0)
    if count(n_repeat) is None:
        raise InvalidCountError("n_repeat", n_repeat, "repetitions that are timed")
    if quantiles is not None:
        try:
            quantiles = [real("quantiles", each) for each in list(quantiles)]
        except TypeError:
            raise InvalidArgumentError(
                f"quantiles={short_repr(quantiles)} is not a list of numbers from 0 to 1."
            ) from None
        if not all(0 <= each <= 1 for each in quantiles):
            raise InvalidValueError(f"quantiles={short_repr(quantiles)} is not a list of numbers from 0 to 1.")
    on_gpu = not simulator.ACTIVE and torch.cuda.is_available()
    for _ in range(n_warmup):
        barrier_fn()
        preamble_fn()
        barrier_fn()
        fn()
    if on_gpu:
        # Written before every repetition, so that none finds its data in the L2 cache.
        flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(n_repeat)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(n_repeat)]
    milliseconds = []
    for repeat in range(n_repeat):
        barrier_fn()
        preamble_fn()
        if on_gpu:
            flush.zero_()
        barrier_fn()
        if on_gpu:
            starts[repeat].record()
            fn()
            ends[repeat].record()
        else:
            begin = time.perf_counter()
            fn()
            milliseconds.append(1e3 * (time.perf_counter() - begin))
    barrier_fn()
    if on_gpu:
        torch.cuda.synchronize()
        milliseconds = [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]
    times = torch.tensor(milliseconds, dtype=torch.float64)
    if quantiles is not None:
        values = torch.quantile(times, torch.tensor(quantiles, dtype=torch.float64)).tolist()
        return values[0] if len(values) == 1 else values
    return _MODES[return_mode](times)


def replay_microseconds(
    fn: Callable[[], Any],
    barrier_fn: Callable[[], Any] = _nothing,
    per_graph: int = 20,
    replays: int = 15,
    warmups: int = 15,
) -> float:
    """Microseconds of one ``fn`` on this rank's GPU: the median over replays of a graph of ``per_graph`` calls.

    ``warmups``: replays that are not timed, since a GPU that was idle, while the host compiled, takes a while to reach
    its speed. Nothing of the host is in it.
    """
    return microseconds_in_turns([capture(fn, barrier_fn, per_graph)], per_graph, replays, warmups)[0]


def capture(fn: Callable[[], Any], barrier_fn: Callable[[], Any], per_graph: int) -> torch.cuda.CUDAGraph:
    """A graph of ``per_graph`` calls of ``fn``, with ``barrier_fn`` once before them, so that ranks start together.

    That is ``ctx.device_barrier``. Both must be capturable and have been called before. Calls of ``fn`` follow each
    other without a gap, so what it moves should not fit the L2 cache unless that is meant. The graph keeps ``fn``,
    and so the memory that this alone has.
    """
    graph = torch.cuda.CUDAGraph()
    graph.keeps_alive = fn, barrier_fn  # type: ignore[attr-defined]
    with torch.cuda.graph(graph):
        barrier_fn()
        for _ in range(per_graph):
            fn()
    return graph


def microseconds_in_turns(
    graphs: Sequence[torch.cuda.CUDAGraph], per_graph: int, replays: int, warmups: int
) -> list[float]:
    """Of one call of each graph, as `replay_microseconds` of one.

    They are replayed by turns, so that a GPU that is faster at one time than at another is so for all of them; in
    another order each time, the same on all ranks, as what comes before makes a difference too.
    """
    times: list[list[float]] = [[] for _ in graphs]
    pairs, random = list(zip(graphs, times, strict=True)), Random(0)
    for turn in range(warmups + replays):
        for graph, mine in random.sample(pairs, len(pairs)):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= warmups:
                mine.append(1e3 * start.elapsed_time(end) / per_graph)
    return [sorted(mine)[replays // 2] for mine in times]


def counts(nbytes: int, itemsize: int, size: int) -> tuple[int, int, int]:
    """Elements of `Operands` of ``nbytes``: a little less where ``size`` ranks could not share that.

    Parts of 16 bytes and more are a multiple of that, so that any number of ranks moves them by the widest accesses.
    """
    part = nbytes // size
    part = max(1, (part - part % 16 if part > 16 else part) // itemsize)
    return part * size, part * size, part


class Operands(NamedTuple):
    """Tensors of one size for the collectives: the input and output of ``[n]``, and a rank's part of ``[n / W]``."""

    whole: torch.Tensor
    out: torch.Tensor
    part: torch.Tensor
