"""``python -m iris bench memory``: how much memory of a GPU process groups take.

That is what the driver says (cudaMemGetInfo), so it holds everything: staging, flags, and the code of the kernels that
the first calls load. Nothing else may use the GPUs meanwhile. In the simulator it is the memory that each process has.
"""

from collections.abc import Callable
from pathlib import Path

import click
import torch
import torch.distributed as dist

from iris import distributed as distributed  # registers the backend, where Iris is not installed
from iris import simulator
from iris.bench.report import save
from iris.context import Iris, iris

KIB = 1 << 10
NOTE = "Of processes in the simulator: this says nothing about a GPU."


def run_on_rank(groups: int, out: Path | None) -> list[str]:
    """Print the figures, and write them if asked for; collective over the ranks. Returns nothing wrong."""
    with iris(1 << 20) as ctx:
        figures = measure(ctx, groups)
        if ctx.cur_rank == 0:
            for name, mebibytes in figures.items():
                click.echo(f"{name.removesuffix('_MiB').replace('_', ' ')}: {mebibytes:.2f} MiB")
            if simulator.ACTIVE:
                click.echo(NOTE)
            if out is not None:
                save(out, ctx.num_ranks, figures, ctx.num_hosts)
    return []


def measure(ctx: Iris, groups: int) -> dict[str, float]:
    """MiB on the rank where it is most, by what takes it; ``groups``: over how many a mean is taken."""
    made: list[dist.ProcessGroup] = []
    x, backend = torch.ones(KIB // 4, device=ctx.device), f"{ctx.device.type}:iris"

    def use(members: list[int]) -> None:
        group = dist.new_group(members, backend=backend)
        if isinstance(group, dist.ProcessGroup):  # of which this rank is a member
            dist.all_reduce(x, group=group)
            made.append(group)

    def of_all(count: int) -> None:
        for _ in range(count):
            use(list(range(ctx.num_ranks)))

    def of_one(count: int) -> None:
        for _ in range(count):
            for rank in range(ctx.num_ranks):
                use([rank])

    def destroyed() -> None:
        while made:
            dist.destroy_process_group(made.pop())

    begin = used(ctx)
    return {
        "first_use_of_a_group_MiB": spent(ctx, lambda: of_all(1)),
        "each_further_group_of_the_same_ranks_MiB": spent(ctx, lambda: of_all(groups)) / groups,
        "first_use_of_a_group_of_one_rank_MiB": spent(ctx, lambda: of_one(1)),
        "each_further_group_of_one_rank_MiB": spent(ctx, lambda: of_one(groups)) / groups,
        "left_when_all_are_destroyed_MiB": spent(ctx, destroyed, begin),
    }


def spent(ctx: Iris, step: Callable[[], object], begin: int | None = None) -> float:
    """By how many MiB a step raises what is used, or since it was ``begin``; on the rank where that is most."""
    before = used(ctx) if begin is None else begin
    step()
    grown = used(ctx) - before
    return max(ctx.broadcast(grown, rank) for rank in range(ctx.num_ranks)) / (1 << 20)


def used(ctx: Iris) -> int:
    """Bytes of this rank's GPU that are used, once all ranks have come here. In the simulator, of this process."""
    ctx.barrier()
    if ctx.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(ctx.device)
        return total - free
    sizes = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(sizes["VmRSS"].split()[0]) * KIB
