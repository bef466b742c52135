"""How fast grouped GEMMs are, beside one dense product of as many operations, and torch's grouped GEMM, on one GPU.

    python benchmarks/grouped_mm.py                                  # bf16, then fp8 with scales of blocks and of lines
    python benchmarks/grouped_mm.py --case 32x1024x7168x4096 --kind bfloat16 --output grouped_mm.json

A case is experts x rows of each on average x K x N. Tokens choose experts at random, so no two have as many rows. Two
limits stand beside each time: the operations at the peak of H200 (989 TFLOP/s of bf16, 1979 of fp8), and one reading
of the weights of experts that have rows, at 4.8 TB/s. One expert's rows of both kernels' results are compared with a
product in float32 first. What Iris cannot do ends the program; what others cannot is left out, and said.
In the simulator times mean nothing.
"""

import json
import sys
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

import iris
from iris.bench.report import environment
from iris.bench.timing import replay_microseconds
from iris.ops import FusedConfig, grouped_mm

DEVICE = "cpu" if iris.simulator.ACTIVE else "cuda"
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
# Of 4096 tokens on each of 8 ranks with 256 experts, 8 a token: a rank's 32. All 256 on one GPU. And steps of decoding.
CASES = [
    "32x1024x7168x4096",
    "32x1024x2048x7168",
    "128x256x7168x4096",
    "32x64x7168x4096",
    "32x4x7168x4096",
    "128x1x7168x4096",
]
KINDS = ("bfloat16", "fp8 blocks", "fp8 lines")
TRITON = {
    "bfloat16": FusedConfig(block_size_m=128, block_size_n=256),
    "fp8": FusedConfig(block_size_m=128, block_size_n=128, block_size_k=128),
}
PEAK_TFLOPS, MEMORY_TBPS = {"bfloat16": 989, "fp8": 1979}, 4.8
LIBRARIES = ("iris", "iris gated", "iris triton", "dense", "torch grouped")


def inputs(kind, E, rows, K, N):
    """A and B, scales of both, the rows of each expert and where these end."""
    chosen = torch.randint(E, (E * rows,), generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(chosen, minlength=E)
    dtype = BF16 if kind == "bfloat16" else FP8
    a = torch.randn(E * rows, K, device=DEVICE, dtype=BF16).to(dtype)
    b = torch.empty(E, N, K, device=DEVICE, dtype=dtype)
    for each in b:
        each.copy_(torch.randn(N, K, device=DEVICE, dtype=BF16))
    scales = {
        "bfloat16": (None, None),
        "fp8 blocks": ((E * rows, -(-K // 128)), (E, -(-N // 128), -(-K // 128))),
        "fp8 lines": ((E * rows,), (E, N)),
    }[kind]
    scale_a, scale_b = (None if shape is None else 0.5 + torch.rand(shape, device=DEVICE) for shape in scales)
    return a, b.transpose(1, 2), scale_a, scale_b, counts, counts.cumsum(0).to(torch.int32).to(DEVICE)


def calls(kind, a, b, scale_a, scale_b, offs):
    """What each library does; the dense product is of all rows and one expert's B."""
    given = {"offs": offs, "scale_a": scale_a, "scale_b": scale_b}
    out = torch.empty(len(a), b.shape[2], device=DEVICE, dtype=BF16)
    gated = torch.empty(len(a), b.shape[2] // 2, device=DEVICE, dtype=BF16)
    tiles = TRITON["bfloat16" if kind == "bfloat16" else "fp8"]
    one = torch.ones((), device=DEVICE)

    def dense():
        if kind == "bfloat16":
            return torch.matmul(a, b[0])
        if kind == "fp8 lines":
            return torch._scaled_mm(a, b[0], scale_a[:, None], scale_b[:1], out_dtype=BF16)
        return torch._scaled_mm(a, b[0], one, one, out_dtype=BF16)

    def torchs():
        if kind == "bfloat16":
            return torch._grouped_mm(a, b, offs=offs)
        if kind == "fp8 lines":
            return torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs=offs, out_dtype=BF16)
        raise NotImplementedError("not with scales of blocks")

    ways = {
        "iris": lambda: grouped_mm(a, b, **given, out=out),
        "iris gated": lambda: grouped_mm(a, b, **given, out=gated, activation="silu_and_mul"),
        "iris triton": lambda: grouped_mm(a, b, **given, out=out, config=tiles),
    }
    return {**ways, "dense": dense, "torch grouped": torchs}


def check(result, a, b, scale_a, scale_b, counts):
    """The rows of the expert that has most, against float32."""
    expert = int(counts.argmax())
    rows = slice(int(counts[:expert].sum()), int(counts[: expert + 1].sum()))
    left, right = a[rows].float(), b[expert].float()
    if scale_a is not None:
        of_rows = scale_a[rows]
        left *= of_rows[:, None] if of_rows.dim() == 1 else of_rows.repeat_interleave(128, 1)[:, : left.shape[1]]
        of_b = scale_b[expert]
        if of_b.dim() == 2:
            of_b = of_b.repeat_interleave(128, 0).repeat_interleave(128, 1)[: right.shape[1], : right.shape[0]].t()
        right = right * of_b
    exact = left @ right
    error = (result[rows].float() - exact).norm() / exact.norm()
    if not error < 1e-2:
        raise click.ClickException(f"a result is wrong: its error is {error:.3g} of its size")


def microseconds(way):
    """Of one call among many of a CUDA graph: nothing of the host is in it."""
    way()
    if iris.simulator.ACTIVE:
        return 1e3 * iris.do_bench(way, n_warmup=0, n_repeat=1)
    return replay_microseconds(way, per_graph=5, replays=9, warmups=5)


@click.command(help=__doc__)
@click.option("--case", "cases", multiple=True, default=CASES, help="experts x rows x K x N")
@click.option("--kind", "kinds", multiple=True, default=KINDS, type=click.Choice(KINDS))
@click.option("--library", "libraries", multiple=True, default=LIBRARIES, type=click.Choice(LIBRARIES))
@click.option("--output", type=click.Path(path_type=Path), help="a file for the figures")
def main(cases, kinds, libraries, output):
    table = Table("kind", "experts x rows x K x N", "operations us", "weights us", *libraries, title="microseconds")
    figures = []
    for kind in kinds:
        for case in cases:
            E, rows, K, N = map(int, case.split("x"))
            *operands, counts, offs = inputs(kind, E, rows, K, N)
            ways = calls(kind, *operands, offs)
            for library in ("iris", "iris triton"):
                check(ways[library](), *operands, counts)
            peak = PEAK_TFLOPS[kind.split()[0]]
            floors = {
                "operations": 2e-6 * E * rows * K * N / peak,
                "weights": 1e-6 * int((counts > 0).sum()) * K * N * operands[1].itemsize / MEMORY_TBPS,
            }
            times = {}
            for library in libraries:
                try:
                    times[library] = microseconds(ways[library])
                except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
                    if library.startswith("iris"):
                        raise
                    times[library] = None
                    print(f"{library}, {kind}, {case}: {str(error).splitlines()[0]:.200}", file=sys.stderr)
            shown = [*floors.values(), *times.values()]
            table.add_row(kind, case, *("" if each is None else f"{each:.1f}" for each in shown))
            figures.append({"kind": kind, "case": case, "floors_us": floors, "us": times})
            del operands, ways
    Console(width=max(120, 24 * len(libraries))).print(table)
    if output:
        output.write_text(json.dumps({**environment(), "rows": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
