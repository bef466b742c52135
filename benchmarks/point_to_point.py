"""What one-sided accesses reach: bandwidth to a neighbour, flags, single operations and the device barrier.

    torchrun --nproc-per-node 4 benchmarks/point_to_point.py --output benchmarks/results/point_to_point.json

Every rank moves ``--mebibytes`` to or from the next rank at the same time. Times are medians over replays of a CUDA
graph, and the slowest rank counts. In the simulator the data are checked and the times mean nothing.
"""

import sys
import time
from pathlib import Path

import click
import point_to_point_kernels as kernels
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import iris
from iris.bench.report import below_floor, environment, save
from iris.bench.timing import replay_microseconds

ON_GPU = not iris.simulator.ACTIVE
BLOCK = 8192  # bf16 elements a program step: 16 KiB
NUM_WARPS = 8
VECTOR = 8  # bf16 elements of 16 bytes


def microseconds(ctx, fn, per_graph=20):
    """The slowest rank's time for ``fn``, which every rank runs at once."""
    fn()
    ctx.barrier()
    if ON_GPU:
        spent = replay_microseconds(fn, ctx.device_barrier, per_graph)
    else:
        start = time.perf_counter()
        fn()
        spent = 1e6 * (time.perf_counter() - start)
    return max(ctx.broadcast(spent, src) for src in range(ctx.num_ranks))


def check(actual, expected, what):
    if not torch.equal(actual, expected):
        raise click.ClickException(f"{what} moved wrong data")


def bandwidths(ctx, mebibytes, programs, figures, progress):
    n = (mebibytes << 20) // 2
    source, target = ctx.randn(n, dtype=torch.bfloat16), ctx.zeros(n, dtype=torch.bfloat16)
    peer, previous = (ctx.cur_rank + 1) % ctx.num_ranks, (ctx.cur_rank - 1) % ctx.num_ranks
    context, remote = ctx.get_device_context(), ctx.peer(target, peer)
    ctx.barrier()
    gluon = {"VECTOR": VECTOR, "num_warps": NUM_WARPS}
    triton_options = {"num_warps": NUM_WARPS}
    cases = {
        "store_triton": (kernels.triton_store, (context, source, target, n, peer, BLOCK), triton_options),
        "store_by_hand": (kernels.by_hand_store, (source, remote, n, BLOCK), triton_options),
        "store_gluon": (kernels.gluon_store, (context, source, target, n, peer, BLOCK), gluon),
        "load_triton": (kernels.triton_load, (context, source, target, n, peer, BLOCK), triton_options),
        "load_gluon": (kernels.gluon_load, (context, source, target, n, peer, BLOCK), gluon),
        "get_triton": (kernels.triton_get, (context, source, target, n, peer, BLOCK), triton_options),
        "put_triton": (kernels.triton_put, (context, source, target, n, peer, BLOCK), triton_options),
        "put_gluon": (kernels.gluon_put, (context, source, target, n, peer, BLOCK), gluon),
    }
    task = progress.add_task("bandwidth", total=len(cases) * len(programs))
    for count in programs:
        for name, (kernel, args, options) in cases.items():
            spent = microseconds(ctx, lambda k=kernel, a=args, o=options, g=count: k[(g,)](*a, **o))
            figures[f"{name}_{count}_GBps"] = n * 2 / spent / 1e3
            progress.advance(task)
            ctx.barrier()
            if name.startswith(("get", "put")):
                check(target, ctx.peer(source, peer if name.startswith("get") else previous), name)
            ctx.barrier()
            target.zero_()
    if ON_GPU:
        # The copy engine beside them: the link without any program.
        spent = microseconds(ctx, lambda: remote.copy_(source))
        figures["copy_engine_GBps"] = n * 2 / spent / 1e3


def latencies(ctx, rounds, figures):
    peer = (ctx.cur_rank + 1) % ctx.num_ranks
    context = ctx.get_device_context()
    flag = ctx.zeros(1, dtype=torch.int32)
    out = ctx.zeros(1, dtype=torch.int64)
    counter = ctx.zeros(1, dtype=torch.int64)
    # A random cycle through 64 MiB: no two loads hit the same line, nor does a cache hold them.
    size = (1 << 23) if ON_GPU else 64
    order = torch.randperm(size, device=ctx.device)
    links = ctx.empty(size, dtype=torch.int64)
    links[order] = order.roll(-1)
    ctx.barrier()

    done = 0

    def hops():
        nonlocal done
        kernels.ping_pong[(1,)](context, flag, rounds, done, num_warps=1)
        done += rounds

    def timed(fn):
        """Single launches between events: a launch's own time is small beside ``rounds`` operations."""
        fn()
        spent = []
        for _ in range(5):
            ctx.barrier()
            if ON_GPU:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                fn()
                end.record()
                end.synchronize()
                spent.append(1e3 * start.elapsed_time(end))
            else:
                begin = time.perf_counter()
                fn()
                spent.append(1e6 * (time.perf_counter() - begin))
        ctx.barrier()
        return max(ctx.broadcast(sorted(spent)[2], src) for src in range(ctx.num_ranks)) / rounds

    figures["flag_round_trip_us"] = timed(hops)
    if ctx.cur_rank < 2:
        check(flag, torch.full_like(flag, done), "the flag")
    figures["remote_load_us"] = timed(lambda: kernels.chase[(1,)](context, links, out, rounds, peer, num_warps=1))
    figures["local_load_us"] = timed(
        lambda: kernels.chase[(1,)](context, links, out, rounds, ctx.cur_rank, num_warps=1)
    )
    out.zero_()
    figures["remote_atomic_us"] = timed(
        lambda: kernels.count_up[(1,)](context, counter, out, rounds, peer, num_warps=1)
    )
    check(counter, torch.full_like(counter, 6 * rounds), "the counter")
    if ON_GPU:
        figures["device_barrier_us"] = max(
            ctx.broadcast(replay_microseconds(ctx.device_barrier, per_graph=100), src) for src in range(ctx.num_ranks)
        )
        figures["device_barrier_host_us"] = host_cost(ctx, ctx.device_barrier)
    begin = time.perf_counter()
    for _ in range(rounds):
        ctx.barrier()
    figures["host_barrier_us"] = 1e6 * (time.perf_counter() - begin) / rounds


def host_cost(ctx, fn, calls=200):
    """Median microseconds that a call keeps the host, with the queue of the stream never full."""
    spent = []
    for _ in range(20):
        ctx.barrier()
        begin = time.perf_counter()
        for _ in range(calls // 20):
            fn()
        spent.append(1e6 * (time.perf_counter() - begin) / (calls // 20))
    return sorted(spent)[len(spent) // 2]


@click.command()
@click.option("--mebibytes", default=256 if ON_GPU else 1, show_default=True, help="What each rank moves.")
@click.option("--programs", default="32,132" if ON_GPU else "2", show_default=True, help="Sizes of the grid.")
@click.option("--rounds", default=1000 if ON_GPU else 5, show_default=True, help="Operations in a row, for latencies.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the figures here, as JSON.")
@click.option(
    "--floors", type=click.Path(exists=True, path_type=Path), help="Fail where a figure misses its bound there."
)
def main(mebibytes: int, programs: str, rounds: int, output: Path | None, floors: Path | None) -> None:
    ctx = iris.iris((2 * mebibytes << 20) + (128 << 20))
    ctx.device_barrier()  # the first call compiles; the others are captured
    console = Console(stderr=False, quiet=ctx.cur_rank != 0)
    figures: dict[str, float] = {}
    with Progress(console=console, disable=ctx.cur_rank != 0) as progress:
        bandwidths(ctx, mebibytes, [int(count) for count in programs.split(",")], figures, progress)
        latencies(ctx, rounds, figures)
    table = Table("figure", "value", title=f"{ctx.num_ranks} × {environment()['device']}")
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}")
    console.print(table)
    if ctx.cur_rank == 0 and output:
        save(output, ctx.num_ranks, figures)
    missed = below_floor(floors, "point_to_point", ctx.num_ranks, figures) if floors else []
    for line in missed:
        console.print(f"[red]below its floor: {line}")
    ctx.close()
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
