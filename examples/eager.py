"""Times of calls as the host enqueues them, for what no graph can capture: the examples 16 and 17."""

from collections.abc import Callable

from workload import NOTE, SIMULATED

import iris


def eager_microseconds(ctx: iris.Iris, call: Callable[[], object]) -> float:
    """Of one call on the slowest rank: the median, with the caches empty and all ranks at the start together."""
    warmups, repeats = (0, 1) if SIMULATED else (10, 30)
    mine = 1e3 * iris.do_bench(call, ctx.barrier, n_warmup=warmups, n_repeat=repeats, return_mode="median")
    return max(ctx.broadcast(mine, rank) for rank in range(ctx.num_ranks))


def report_eager(ctx: iris.Iris, title: str, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Time each call in turn, all in one run, and print them; the first is what others are compared with."""
    times = {name: eager_microseconds(ctx, call) for name, call in calls.items()}
    if ctx.get_rank() == 0:
        print(title)
        for name, time in times.items():
            print(f"  {name}: {time:.1f} µs, {time / next(iter(times.values())):.2f} of the first's time")
        if SIMULATED:
            print(NOTE)
    return times
