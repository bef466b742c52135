"""How fast a layer of experts is as one call, beside its parts one after the other, on the GPUs of this host.

    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/experts_mlp.py --output experts_mlp.json
    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/experts_mlp.py --tokens 512 --tokens 4096 --kind fp8

Each rank has as many tokens, which choose ``--top-k`` of ``--experts`` at random. In fp8 rows are rounded on the way,
and the activation between the products, with a factor for 128 elements; weights have scales of blocks. All ways are
CUDA graphs, replayed by turns, on the same data; the slowest rank counts. Their results are compared first.

* experts_mlp: `ctx.ops.experts_mlp`.
* parts: dispatch, `grouped_mm` with the activation, for fp8 the rounding, `grouped_mm`, combine.
* of these alone: dispatch and combine; the products.
* with ``--overlap``, experts_mlp with combine beside the second product, on Hopper.

``floors_us`` are of the rank with most rows: the products' operations at ``--tflops``, one reading of the weights that
are used at ``--memory-tbps``, and the link's bytes at ``--link-gbps`` there and back. In the simulator times mean
nothing.
"""

import json
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

import iris
from iris.bench.experts import FP8, Shape, link_bytes, route
from iris.bench.report import environment
from iris.bench.timing import capture, do_bench, microseconds_in_turns
from iris.experts import ExpertsConfig
from iris.ops import grouped_mm
from iris.ops.grouped.quantise import quantise

ON_GPU = not iris.simulator.ACTIVE
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
KINDS = ("bfloat16", "fp8")
WAYS = ("experts_mlp", "parts", "dispatch and combine", "products")
OVERLAPPED = "overlapped"
# What H200 reaches in long products, of bf16 and fp8.
TFLOPS = {"bfloat16": 750, "fp8": 1400}


class Layer:
    """Weights, tokens and memory of a rank, and the ways to carry it."""

    def __init__(self, ctx, shape, inner, kind, sms, overlap):
        self.ctx, self.shape, self.inner, self.narrow = ctx, shape, inner, kind == "fp8"
        tokens, hidden, num_experts, top_k = shape
        # The kernels for few tokens cannot work beside a product.
        low_latency = False if overlap else None
        config = ExpertsConfig(in_flight=1, layouts=("compact",), num_sms=sms or None, low_latency=low_latency)
        self.ep = ctx.experts(
            num_experts=num_experts, hidden=hidden, max_tokens=tokens, top_k=top_k, dtype=BF16, config=config
        )
        self.routed = route(shape, ctx.cur_rank, BF16, ctx.device)
        E, generator = self.ep.num_local_experts, torch.Generator(ctx.device).manual_seed(ctx.cur_rank)
        self.weights, self.scales = [], [None, None]
        for rows, columns in ((2 * inner, hidden), (hidden, inner)):
            weight = torch.empty(E, rows, columns, dtype=E4M3 if self.narrow else BF16, device=ctx.device)
            for each in weight:
                each.copy_(torch.randn(rows, columns, generator=generator, device=ctx.device) / columns**0.5)
            self.weights.append(weight)
        if self.narrow:
            self.scales = [
                0.5 + torch.rand(E, -(-each.shape[1] // 128), -(-each.shape[2] // 128), device=ctx.device)
                for each in self.weights
            ]
        self.out = torch.empty(tokens, hidden, dtype=BF16, device=ctx.device)
        received = self.dispatch()
        rows = len(received.rows)
        self.hidden = torch.empty(rows, inner, dtype=BF16, device=ctx.device)
        self.quantised = torch.empty(rows, inner, dtype=E4M3, device=ctx.device) if self.narrow else None
        self.factors = torch.empty(rows, -(-inner // 128), device=ctx.device) if self.narrow else None
        self.made = torch.zeros(rows, hidden, dtype=BF16, device=ctx.device)
        # Of the products alone: rows that stay where they are.
        self.rows = received.rows.clone(), None if received.scales is None else received.scales.clone()
        self.groups = {"offs": received.offsets[1:].clone(), "counts": received.counts.clone()}
        self.ep.combine(self.made, received, out=self.out)

    def dispatch(self):
        x, ids, weights = self.routed
        return self.ep.dispatch(x, ids, weights, layout="compact", quantize="fp8_block128" if self.narrow else None)

    def multiply(self, rows, scales, groups):
        up, down = self.weights
        hidden, factors = self.hidden, self.factors
        grouped_mm(
            rows,
            up.transpose(1, 2),
            **groups,
            scale_a=scales,
            scale_b=self.scales[0],
            activation="silu_and_mul",
            out=hidden,
        )
        if self.narrow:
            quantise(hidden, self.quantised, factors, **groups)
            hidden = self.quantised
        grouped_mm(hidden, down.transpose(1, 2), **groups, scale_a=factors, scale_b=self.scales[1], out=self.made)

    def ways(self, overlap):
        """By their names; each leaves its result in ``out``, but the products alone."""

        def experts_mlp(overlap=False):
            given = {"scale_up": self.scales[0], "scale_down": self.scales[1], "overlap": overlap}
            self.ctx.ops.experts_mlp(self.out, *self.routed, *self.weights, **given, experts=self.ep)

        def parts():
            received = self.dispatch()
            groups = {"offs": received.offsets[1:], "counts": received.counts}
            self.multiply(received.rows, received.scales, groups)
            self.ep.combine(self.made, received, out=self.out)

        def exchange():
            self.ep.combine(self.made, self.dispatch(), out=self.out)

        def products():
            self.multiply(*self.rows, self.groups)

        found = dict(zip(WAYS, (experts_mlp, parts, exchange, products), strict=True))
        return found | ({OVERLAPPED: lambda: experts_mlp(True)} if overlap else {})

    def check(self, ways):
        """Raise unless all whole ways give the same."""
        results = {}
        for name in (*WAYS[:2], OVERLAPPED):
            if name in ways:
                self.out.fill_(torch.nan)
                ways[name]()
                results[name] = self.out.float()
        for name, result in results.items():
            error = (result - results["parts"]).norm() / results["parts"].norm()
            if not error < 1e-2:
                raise click.ClickException(f"the result of {name} is wrong: it differs by {error:.3g} of its size")

    def floors(self, rates):
        """Microseconds."""
        counts = self.groups["counts"]
        elements = 3 * self.inner * self.shape.hidden
        moved = link_bytes(self.shape, self.ctx.num_ranks, BF16, self.ctx.device, FP8 if self.narrow else "iris")
        return {
            "operations": 2e-6 * int(counts.sum()) * elements / rates["tflops"],
            "weights": 1e-6 * int((counts > 0).sum()) * elements * self.weights[0].itemsize / rates["memory_tbps"],
            "link": 1e-3 * moved / rates["link_gbps"],
        }


def of_the_slowest(ctx, figures):
    everyone = [ctx.broadcast(figures, rank) for rank in range(ctx.num_ranks)]
    return {name: max(each[name] for each in everyone) for name in figures}


def measure(ctx, shape, inner, kind, sms, rates, overlap=False, per_graph=3, replays=11):
    """A row of the figures. Collective."""
    layer = Layer(ctx, shape, inner, kind, sms, overlap)
    ways = layer.ways(overlap)
    layer.check(ways)
    for way in ways.values():
        way()
    ctx.barrier()
    if ON_GPU:
        graphs = [capture(way, ctx.device_barrier, per_graph) for way in ways.values()]
        ctx.barrier()
        times = microseconds_in_turns(graphs, per_graph, replays, 3)
        del graphs
    else:
        times = [1e3 * do_bench(way, ctx.barrier, n_warmup=0, n_repeat=1) for way in ways.values()]
    times = of_the_slowest(ctx, dict(zip(ways, times, strict=True)))
    floors = of_the_slowest(ctx, layer.floors(rates))
    ctx.barrier()
    layer.ep.close()
    of_parts = times["experts_mlp"] / times["parts"]
    return {
        "kind": kind,
        **shape._asdict(),
        "inner": inner,
        "sms": sms,
        "us": times,
        "of_parts": of_parts,
        "floors_us": floors,
    }


@click.command(help=__doc__)
@click.option("--tokens", multiple=True, type=int, default=(8, 128, 512, 1024, 2048, 4096), help="of each rank")
@click.option("--hidden", type=int, default=7168, show_default=True)
@click.option("--inner", type=int, default=2048, show_default=True, help="elements of the activation")
@click.option("--experts", "num_experts", type=int, default=256, show_default=True, help="of all ranks")
@click.option("--top-k", type=int, default=8, show_default=True)
@click.option("--kind", "kinds", multiple=True, default=KINDS, type=click.Choice(KINDS))
@click.option("--sms", multiple=True, type=int, default=(0,), help="ExpertsConfig.num_sms; 0: its default")
@click.option("--overlap", is_flag=True, help="measure experts_mlp(overlap=True), too")
@click.option("--tflops", type=float, help="that products reach; by default 750 of bf16, 1400 of fp8")
@click.option("--memory-tbps", type=float, default=4.0, show_default=True)
@click.option("--link-gbps", type=float, default=370.0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="a file for the figures")
def main(tokens, hidden, inner, num_experts, top_k, kinds, sms, overlap, tflops, memory_tbps, link_gbps, output):
    with iris.iris(1 << 20) as ctx:
        rows = []
        for kind in kinds:
            rates = {"tflops": tflops or TFLOPS[kind], "memory_tbps": memory_tbps, "link_gbps": link_gbps}
            for count in tokens:
                for programs in sms:
                    shape = Shape(count, hidden, num_experts, top_k)
                    rows.append(measure(ctx, shape, inner, kind, programs, rates, overlap))
                    if ctx.cur_rank == 0 and output:
                        output.write_text(
                            json.dumps({**environment(), "num_ranks": ctx.num_ranks, "rows": rows}, indent=2) + "\n"
                        )
        if ctx.cur_rank == 0:
            show(rows)


def show(rows):
    floors, ways = [*rows[0]["floors_us"]], [*rows[0]["us"]]
    table = Table(
        "kind", "tokens", "SMs", *ways, "of parts", *(f"{each} floor" for each in floors), title="microseconds"
    )
    for row in rows:
        times = (f"{each:.1f}" for each in [*row["us"].values(), *row["floors_us"].values()])
        shown = [*times]
        shown.insert(len(ways), f"{row['of_parts']:.3f}")
        table.add_row(row["kind"], str(row["tokens"]), str(row["sms"] or "own"), *shown)
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
