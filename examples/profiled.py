"""Where the time of a call goes, whoever communicates in it: kernels by kind, and how much of the time they fill.

    python examples/profiled.py step_nccl.json step_iris.json --image steps.svg --microseconds 300

Each file is what torch's profiler has of one call of rank 0, as examples write it with ``--profile FILE``; so the table
has a column for each. Times are ms. What runs on the host is the profiler's too, which slows it down. The picture has
the kernels of each from the middle of the call on, on one axis of time.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import click
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import iris

# What the host's time of a call stands under.
CALL = "the call"

# The first that a kernel's name has decides. A fused product is one kernel that multiplies and communicates, beside
# copies and, where ranks meet or parts are added up, small kernels of its own.
KINDS = {
    "NCCL": r"^nccl",
    "Iris: fused products": r"^((hopper|cdna3)_)?(all_gather_matmul|matmul_|add_parts|handshake|start)",
    "Iris: sums with residual and norm": r"^(one_shot_|two_shot_|sharded_)?rms_norm$",
    "Iris: dispatch and combine of experts": r"^(dispatch|combine|zero_padding|finish)",
    "Iris: collectives": r"^(exchange|broadcast|one_(shot|hop)|two_shot|pull|ring|atomic|sum_over_hosts|_barrier)",
    "products of experts": r"grouped|GroupProblemShape|activation_gradient",
    "attention": r"flash|fmha|attention|sdpa|softmax_warp",
    "products": r"nvjet|gemm|cutlass|xmma|cublas|splitK",
    "copies to other GPUs": r"^Memcpy PtoP",
    "copies": r"^(Memcpy|Memset)",
}
OTHERS = "all others: norms, activations, sorting, the optimizer"
COMMUNICATE = (
    *("NCCL", "Iris: sums with residual and norm", "Iris: dispatch and combine of experts", "Iris: collectives"),
    "copies to other GPUs",
)


class Kernel(NamedTuple):
    """``began``, ``ended``: µs."""

    name: str
    began: float
    ended: float

    @property
    def kind(self) -> str:
        return next((kind for kind, pattern in KINDS.items() if re.search(pattern, self.name)), OTHERS)


class Call(NamedTuple):
    """One call: its kernels and copies, and when the host began and ended to enqueue them, µs."""

    kernels: list[Kernel]
    began: float
    ended: float

    @classmethod
    def load(cls, file: Path) -> "Call":
        events = [each for each in json.loads(file.read_text())["traceEvents"] if each.get("ph") == "X"]
        on_gpu = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        kernels = [Kernel(each["name"], each["ts"], each["ts"] + each["dur"]) for each in on_gpu]
        call = next(each for each in events if each["name"] == CALL and each.get("cat") == "user_annotation")
        began = call["ts"]
        # Before it ranks have met.
        return cls([each for each in kernels if each.began >= began], began, began + call["dur"])

    def rows(self) -> dict[str, str]:
        """What the table has of it: a text for each line. Empty without a GPU."""
        if not self.kernels:
            return {}
        spent, number = Counter[str](), Counter[str]()
        for kernel in self.kernels:
            spent[kernel.kind] += kernel.ended - kernel.began
            number[kernel.kind] += 1
        found = {kind: f"{spent[kind] / 1e3:.2f} in {number[kind]}" for kind in (*KINDS, OTHERS) if number[kind]}
        of_all, of_moves = covered(self.kernels), covered(k for k in self.kernels if k.kind in COMMUNICATE)
        of_rest = covered(k for k in self.kernels if k.kind not in COMMUNICATE)
        whole = max(k.ended for k in self.kernels) - self.began
        return found | {
            "communication beside other kernels": f"{(of_moves + of_rest - of_all) / 1e3:.2f}",
            "communication alone": f"{(of_all - of_rest) / 1e3:.2f}",
            "nothing on the GPU": f"{(whole - of_all) / 1e3:.2f}",
            "from the first call to the last kernel's end": f"{whole / 1e3:.2f}",
            "the host enqueued for": f"{(self.ended - self.began) / 1e3:.2f}",
        }


def covered(kernels: Iterable[Kernel]) -> float:
    """The time in which at least one of them ran, µs."""
    total, until = 0.0, float("-inf")
    for _, began, ended in sorted(kernels, key=lambda kernel: kernel.began):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


def record(ctx: iris.Iris, file: Path, call: Callable[[], object]) -> None:
    """Record what host and GPU of rank 0 do in a call, also for https://ui.perfetto.dev, and print where time goes.

    Collective, since the ranks begin together.
    """

    def synchronize() -> None:
        if ctx.device.type == "cuda":
            torch.cuda.synchronize(ctx.device)

    # The first time the profiler itself takes long to begin.
    for _ in range(2):
        with torch.profiler.profile() as profile:
            ctx.device_barrier()
            synchronize()
            with torch.profiler.record_function(CALL):
                call()
            synchronize()
    if ctx.get_rank() == 0:
        profile.export_chrome_trace(str(file))
        show([file])
    ctx.barrier()


def show(files: list[Path]) -> None:
    columns = [Call.load(file).rows() for file in files]
    lines = dict.fromkeys(line for kind in (*KINDS, OTHERS) for line in [kind] if any(kind in each for each in columns))
    lines |= dict.fromkeys(line for each in columns for line in each)
    table = Table("ms", *(escape(file.stem) for file in files), title="kernels of rank 0, by kind")
    for line in lines:
        table.add_row(line, *(each.get(line, "–") for each in columns))
    Console(width=60 + 30 * len(files)).print(table if lines else "No kernel ran on a GPU.")


COLOURS = ("#d62728", "#2ca02c", "#17becf", "#98df8a", "#bcbd22", "#ff7f0e", "#9467bd", "#1f77b4", "#e377c2", "#8c564b")
OTHERS_COLOUR = "#c7c7c7"


def draw(files: list[Path], image: Path, microseconds: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    colours = dict(zip((*KINDS, OTHERS), (*COLOURS, OTHERS_COLOUR), strict=True))
    figure, axes = pyplot.subplots(figsize=(11, 0.7 * len(files) + 1.4))
    shown = set()
    for line, file in enumerate(files):
        kernels = Call.load(file).kernels
        middle = sorted(kernel.began for kernel in kernels)[len(kernels) // 2]
        for kernel in kernels:
            begin, end = max(kernel.began - middle, 0), min(kernel.ended - middle, microseconds)
            if begin < end:
                axes.barh(
                    -line, end - begin, left=begin, height=0.7, color=colours[kernel.kind], edgecolor="white", lw=0.2
                )
                shown.add(kernel.kind)
    axes.set_yticks([-line for line in range(len(files))], [file.stem for file in files])
    axes.set_xlim(0, microseconds)
    axes.set_xlabel("µs")
    patches = [
        Patch(color=colour, label=kind.partition(":")[0] if kind == OTHERS else kind)
        for kind, colour in colours.items()
        if kind in shown
    ]
    axes.legend(handles=patches, fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
    figure.savefig(image, bbox_inches="tight")
    pyplot.close(figure)


@click.command(help=__doc__)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--image", type=click.Path(dir_okay=False, path_type=Path), help="Draw the kernels; needs matplotlib.")
@click.option("--microseconds", type=click.FloatRange(min=1), default=300.0, show_default=True, help="That are drawn.")
def main(files: tuple[Path, ...], image: Path | None, microseconds: float) -> None:
    show([*files])
    if image:
        draw([*files], image, microseconds)


if __name__ == "__main__":
    main()
