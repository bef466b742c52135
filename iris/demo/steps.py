"""The steps of the demo, as a rank runs them: allocate, launch, check; and what is sent to who started the ranks."""

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from multiprocessing import SimpleQueue

import torch
import triton

from iris import simulator
from iris.bench.timing import do_bench
from iris.context import Iris
from iris.demo import kernels

# Small where a CPU has to do it, large enough to fill a link where a GPU does.
FLOATS = 4096 if simulator.ACTIVE else 1 << 24
MEETING_FLOATS = 4096
BLOCK = 1024 if simulator.ACTIVE else 4096
REPEAT = 3 if simulator.ACTIVE else 20
COUNTERS, TIMES = 8, 16
HEAP_SIZE = 1 << 26 if simulator.ACTIVE else 1 << 29


@dataclass(frozen=True)
class Rank:
    """Where a rank lives."""

    rank: int
    process: int
    device: str
    heap: int
    heap_size: int


@dataclass(frozen=True)
class Outcome:
    """What a rank reports of a step: times in milliseconds, bytes that it moved, and elements that are wrong."""

    rank: int
    step: str
    language: str
    what: str
    moved: int
    milliseconds: float
    wrong: int


@dataclass(frozen=True)
class Step:
    """A step that is ready to run on this rank."""

    language: str
    what: str
    moved: int
    launch: Callable[[], object]
    wrong: Callable[[], int]


def run_all(messages: SimpleQueue) -> None:
    """Run all steps on this rank, together with the others; put a `Rank`, then each `Outcome`, into ``messages``."""
    with Iris(HEAP_SIZE) as ctx:
        rank = ctx.get_rank()
        name = "CPU" if simulator.ACTIVE else torch.cuda.get_device_name(ctx.device)
        messages.put(Rank(rank, os.getpid(), name, ctx.heap.bases[rank], HEAP_SIZE))
        for prepare in STEPS:
            step = prepare(ctx)
            ctx.barrier()
            milliseconds = do_bench(step.launch, ctx.barrier, n_warmup=1, n_repeat=REPEAT, return_mode="median")
            wrong = step.wrong()
            messages.put(Outcome(rank, prepare.__name__, step.language, step.what, step.moved, milliseconds, wrong))


def store(ctx: Iris) -> Step:
    rank, (following, previous) = ctx.get_rank(), neighbours(ctx)
    source, target = ctx.empty(FLOATS), ctx.zeros(FLOATS)
    source.copy_(data(ctx, rank))
    args = (source, target, FLOATS, rank, following, ctx.get_heap_bases(), BLOCK)
    return Step(
        "Triton",
        f"each rank stores {FLOATS} floats into the heap of the next",
        4 * FLOATS,
        lambda: kernels.store[(programs(ctx),)](*args),
        lambda: differing(target, data(ctx, previous)),
    )


def get(ctx: Iris) -> Step:
    rank, (following, _) = ctx.get_rank(), neighbours(ctx)
    source, target = ctx.empty(FLOATS), ctx.zeros(FLOATS)
    source.copy_(data(ctx, rank))
    args = (ctx.get_device_context(), source, target, FLOATS, BLOCK)
    return Step(
        "Gluon",
        f"each rank fetches {FLOATS} floats from the heap of the next",
        4 * FLOATS,
        lambda: kernels.get[(programs(ctx),)](*args),
        lambda: differing(target, data(ctx, following)),
    )


def message(ctx: Iris) -> Step:
    rank, (_, previous) = ctx.get_rank(), neighbours(ctx)
    source, inbox, result = ctx.empty(FLOATS), ctx.zeros(FLOATS), ctx.zeros(FLOATS)
    source.copy_(data(ctx, rank))
    grid = (programs(ctx),)
    arrived, taken = ctx.zeros(grid, dtype=torch.int32), ctx.zeros(grid, dtype=torch.int32)
    handle, rounds = ctx.get_device_context(), itertools.count()
    return Step(
        "Gluon",
        "each rank waits for flags that the one before raises after its data, and doubles what came",
        4 * FLOATS,
        lambda: kernels.message[grid](handle, source, inbox, result, arrived, taken, next(rounds), FLOATS, BLOCK),
        lambda: differing(result, 2 * data(ctx, previous)),
    )


def meet(ctx: Iris) -> Step:
    rank, size = ctx.get_rank(), ctx.get_num_ranks()
    source, slots, result = ctx.empty(MEETING_FLOATS), ctx.zeros(size, MEETING_FLOATS), ctx.zeros(MEETING_FLOATS)
    source.copy_(data(ctx, rank)[:MEETING_FLOATS])
    grid = (triton.cdiv(MEETING_FLOATS, BLOCK),)
    flags = ctx.zeros(*grid, size, dtype=torch.int32)
    args = (ctx.get_device_context(), source, slots, result, flags, MEETING_FLOATS, BLOCK)
    return Step(
        "Triton",
        f"all store {MEETING_FLOATS} floats at all, meet in a barrier inside the kernel, and add them up",
        4 * MEETING_FLOATS * (size - 1),
        lambda: kernels.meet[grid](*args),
        lambda: differing(result, reduce(torch.add, (data(ctx, peer)[:MEETING_FLOATS] for peer in range(size)))),
    )


def count(ctx: Iris) -> Step:
    rank, size = ctx.get_rank(), ctx.get_num_ranks()
    counter = ctx.zeros(1, dtype=torch.int32)
    launches = REPEAT + 1
    total = size * COUNTERS * TIMES * launches

    def wrong() -> int:
        # Other ranks may still be counting when this one has finished.
        ctx.barrier()
        return int(counter.item() != (total if rank == 0 else 0))

    return Step(
        "Triton",
        f"{size} ranks × {COUNTERS} programs add {TIMES} × 1 to a counter of rank 0, {launches} times: {total}",
        0 if rank == 0 else 4 * COUNTERS * TIMES,
        lambda: kernels.count[(COUNTERS,)](ctx.get_device_context(), counter, TIMES),
        wrong,
    )


STEPS = (store, get, message, meet, count)


def programs(ctx: Iris) -> int:
    """As many as surely run at once, for kernels whose programs wait for a peer's."""
    return 4 if simulator.ACTIVE else ctx.get_cu_count()


def neighbours(ctx: Iris) -> tuple[int, int]:
    """The next and the previous rank of the ring."""
    rank, size = ctx.get_rank(), ctx.get_num_ranks()
    return (rank + 1) % size, (rank - 1) % size


def data(ctx: Iris, rank: int) -> torch.Tensor:
    """The floats of a rank: different at each position and on each rank, and exact in sums."""
    return torch.arange(FLOATS, device=ctx.device) % 65536 + 100.0 * rank + 1


def differing(actual: torch.Tensor, expected: torch.Tensor) -> int:
    return int((actual != expected).sum())
