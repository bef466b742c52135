"""What the kernel of dispatch takes on one GPU, which stands for one of several ranks: alone, without their links.

    PYTHONPATH=. python benchmarks/experts_dispatch.py
    PYTHONPATH=. python benchmarks/experts_dispatch.py --ranks 8 --tokens 1024 --kind routing --output dispatch.json

All ranks' memory lies on this GPU. The others have sent what rank 0 waits for, for as many calls as are timed, before
these begin. So a time has everything but the links' latency and rate, and waiting for ranks that are late: what a
kernel does to find out where rows go, and what moving them costs the memory of one GPU. Measured are the launch that
sends, the one that receives, and both in one.

Kinds: "routing", choices alone travel, and no rows; "bfloat16"; "fp8", rows are divided by block on the way. Where each
choice goes is compared with what the host finds, first. In the simulator times mean
nothing, and there can be but one rank.
"""

import json
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

import iris
from iris.bench.experts import Shape, route
from iris.bench.report import environment
from iris.bench.timing import capture, do_bench, microseconds_in_turns
from iris.ccl.kernel_launch import leaving_room
from iris.experts.dispatch import dispatch
from iris.experts.kernel_arguments import Form, Layout, Scales, Slot
from iris.experts.memory import NUM_WARPS, extents, layout_rows, slot_parts, split_rows
from iris.experts.plan import ROUTING
from iris.experts.routing import RECEIVE, SEND, WHOLE
from iris.experts.rows import BY_BLOCK, GROUP
from iris.language.context_tensor import context_tensor
from iris.language.target import on_nvidia, threads_per_warp
from iris.runtime.launch import addresses, prepare

ON_GPU = not iris.simulator.ACTIVE
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
KINDS = ("routing", "bfloat16", "fp8")
PHASES = {"send": SEND, "receive": RECEIVE, "both": WHOLE}
ALIGNMENT = 128
PER_GRAPH, REPLAYS, WARMUPS = (20, 15, 10) if ON_GPU else (1, 1, 0)


class Ranks:
    """All of them in one process: their memory, their tokens, and launches of their dispatches."""

    def __init__(self, ctx, size, shape, programs, kind):
        tokens, hidden, num_experts, top_k = shape
        self.size, self.shape, self.device = size, shape, ctx.device
        self.extents = extents(size, num_experts, top_k, tokens, hidden, BF16, programs)
        parts = slot_parts(self.extents, BF16)
        nbytes = parts[-1].begin + parts[-1].nbytes
        self.memory = [ctx.zeros(nbytes, dtype=torch.uint8) for _ in range(size)]
        # All of it lies in one heap, so each rank's begins as far after that as its memory after the first rank's.
        heap = int(ctx.get_heap_bases()[0])
        bases = [heap + each.data_ptr() - self.memory[0].data_ptr() for each in self.memory]
        self.form = {"routing": ROUTING, "bfloat16": Form()}.get(kind)
        if self.form is None:
            scales = -(-hidden // GROUP)
            self.form = Form(scales, 1 << (scales - 1).bit_length(), BY_BLOCK.value, GROUP, torch.finfo(E4M3).max)
        rows = layout_rows(self.extents, "compact", ALIGNMENT)
        placed = torch.empty(rows, hidden, dtype=BF16, device=self.device)
        self.routed = [route(shape, rank, BF16, self.device) for rank in range(size)]
        self.places = torch.empty(size, tokens, top_k, dtype=torch.int32, device=self.device)
        self.counts = torch.zeros(self.extents.LOCAL, dtype=torch.int32, device=self.device)
        offsets = torch.zeros(self.extents.LOCAL + 1, dtype=torch.int32, device=self.device)
        self.launched = {}
        self.kept = []
        for rank, memory in enumerate(self.memory):
            tensors = [
                memory[part.begin : part.begin + part.nbytes].view(part.dtype).view(part.shape) for part in parts
            ]
            record = ctx._workspace(None).abort_flag.record
            context = context_tensor(rank, bases, ctx.heap.size, record, self.device)
            slot, layout, scales = Slot(context, *tensors[:-1]), Layout(placed, self.counts, offsets, self.places), None
            if self.form.SCALES:
                sent, sent_scales = split_rows(slot.rows, E4M3, self.form.SCALES)
                to, to_scales = split_rows(placed, E4M3, self.form.SCALES)
                slot, layout = slot._replace(rows=sent), layout._replace(rows=to)
                scales = Scales(None, sent_scales, to_scales)
            x, ids, weights = self.routed[rank]
            given = (slot, x, scales, ids, weights, layout, None, None, tokens, 1, ALIGNMENT, self.form)
            self.kept.append(given)
            for name, phase in PHASES.items():
                if rank == 0 or phase is SEND:
                    self.launched[rank, name] = self.prepared((*given, phase.value, self.extents), programs, phase)

    def prepared(self, args, programs, phase):
        resident = 2 * NUM_WARPS * threads_per_warp()
        options = leaving_room(resident) if ON_GPU and on_nvidia() else {}
        grid = ((2 if phase is WHOLE else 1) * programs, 1, 1)
        launch, args = prepare(dispatch, grid, *args, num_warps=self.extents.WARPS, **options), addresses(args)
        return lambda: launch(torch.cuda.current_stream().cuda_stream if ON_GPU else None, args)

    def send_ahead(self, calls):
        """The others' part of so many calls."""
        for rank in range(1, self.size):
            for _ in range(calls):
                self.launched[rank, "send"]()

    def check(self):
        """Where rank 0 has put each choice."""
        ids = torch.stack([each.ids for each in self.routed]).flatten(0, 1)
        local = torch.arange(self.extents.LOCAL, device=self.device)
        has = (ids[:, :, None] == local).any(dim=1).int()
        rooms = (has.sum(dim=0) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        rows = rooms.cumsum(0) - rooms + has.cumsum(0) - has
        here = ids < self.extents.LOCAL
        wanted = torch.where(here, rows.gather(1, torch.where(here, ids, 0)), -1)
        if not torch.equal(self.places.flatten(0, 1).long(), wanted) or not torch.equal(
            self.counts.long(), has.sum(dim=0)
        ):
            raise click.ClickException("a result is wrong: rows go to other places than they should")


def microseconds(ranks):
    """Of each phase of rank 0's call."""
    ranks.send_ahead(1)
    ranks.launched[0, "both"]()
    ranks.check()
    calls = {name: ranks.launched[0, name] for name in PHASES}
    if not ON_GPU:
        times = {}
        for name, call in calls.items():
            ranks.send_ahead(1)
            times[name] = 1e3 * do_bench(call, n_warmup=0, n_repeat=1)
        return times
    # A launch that receives finds what rank 0 itself has sent; one of both is of its own.
    ahead = 3 * len(calls) + (REPLAYS + WARMUPS) * PER_GRAPH * 2
    ranks.send_ahead(ahead)
    for _ in range(ahead):
        ranks.launched[0, "send"]()
    graphs = [capture(call, lambda: None, PER_GRAPH) for call in calls.values()]
    times = microseconds_in_turns(graphs, PER_GRAPH, REPLAYS, WARMUPS)
    ranks.check()
    return dict(zip(calls, times, strict=True))


@click.command(help=__doc__)
@click.option("--ranks", "size", type=click.IntRange(1, 32), default=2)
@click.option("--tokens", type=click.IntRange(1), multiple=True, default=(128, 512, 1024, 4096), help="of a rank")
@click.option("--hidden", type=click.IntRange(1), default=7168)
@click.option("--experts", "num_experts", type=click.IntRange(1), default=256)
@click.option("--top-k", type=click.IntRange(1), default=8)
@click.option("--programs", type=click.IntRange(1), default=128, help="that send, and as many that receive")
@click.option("--kind", "kinds", multiple=True, default=KINDS, type=click.Choice(KINDS))
@click.option("--output", type=click.Path(path_type=Path), help="a file for the figures")
def main(size, tokens, hidden, num_experts, top_k, programs, kinds, output):
    table = Table("kind", "tokens", *PHASES, title="microseconds")
    figures = []
    for kind in kinds:
        for count in tokens:
            shape = Shape(count, hidden, num_experts, top_k)
            # Room for all ranks' memory, and a page for each.
            sizes = extents(size, num_experts, top_k, count, hidden, BF16, programs)
            last = slot_parts(sizes, BF16)[-1]
            with iris.iris(size * (last.begin + last.nbytes + (1 << 21))) as ctx:
                times = microseconds(Ranks(ctx, size, shape, programs, kind))
            table.add_row(kind, str(count), *(f"{each:.1f}" for each in times.values()))
            figures.append({"kind": kind, "ranks": size, "programs": programs, **shape._asdict(), "us": times})
    Console(width=100).print(table)
    if output:
        output.write_text(json.dumps({**environment(), "rows": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
