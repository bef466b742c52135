"""Starts the ranks of the demo, shows how far they are, and what came of it."""

import multiprocessing
import os
import time

import torch
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from iris import simulator, wait_limit
from iris.demo import steps
from iris.demo.steps import Outcome, Rank
from iris.errors import NoGpuForRankError, readable
from iris.spawn import launch

# A demo that hangs should say why, and soon.
WAIT_LIMIT_S = 20

# A progress bar appears when there has been nothing to see for so long.
PATIENCE_S = 2


def run(num_ranks: int) -> bool:
    """Run the demo with ``num_ranks`` ranks; True if all data arrived as they should. Blocks.

    Raises
    ------
    SystemExit
        A rank failed; the text says which, and how.
    NoGpuForRankError
        There are too few GPUs, and IRIS_SIMULATOR=0.
    """
    console = Console(highlight=False)
    simulated, reason = choose_machine(num_ranks)
    os.environ.setdefault(wait_limit.VARIABLE, str(WAIT_LIMIT_S))
    console.print(f"\n[bold]Iris[/]: {num_ranks} ranks {'in the simulator' if simulated else 'on GPUs'}, {reason}")
    ranks, outcomes = watch(num_ranks, console)
    show_ranks(console, ranks)
    right = show_outcomes(console, outcomes, simulated)
    if right:
        console.print(
            "[bold green]✓ All data arrived as they should.[/] To go on: docs/quick-start.md and examples/.\n"
        )
    else:
        console.print("[bold red]✗ Some data are wrong.[/] `python -m iris info` tells about this machine.\n")
    return right


def choose_machine(num_ranks: int) -> tuple[bool, str]:
    """Whether the ranks are to run in the simulator, and why. Decides it for the processes to come."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if simulator.ACTIVE:
        return True, f"{simulator.VARIABLE}=1" if os.environ.get(simulator.VARIABLE) else "since there is no GPU"
    if gpus >= num_ranks:
        return False, "one each"
    if os.environ.get(simulator.VARIABLE) == "0":
        raise NoGpuForRankError(
            f"{num_ranks} ranks need a GPU each, there are {gpus}, and {simulator.VARIABLE}=0 forbids the simulator. "
            f"Unset it, or ask for fewer ranks."
        )
    os.environ[simulator.VARIABLE] = "1"
    return True, f"since they are more than the GPUs here ({gpus})"


def watch(num_ranks: int, console: Console) -> tuple[list[Rank], list[list[Outcome]]]:
    """Start the ranks and collect what they send: each rank, and of each step every rank's outcome."""
    messages = multiprocessing.get_context("spawn").SimpleQueue()
    ranks: list[Rank] = []
    outcomes: dict[str, list[Outcome]] = {prepare.__name__: [] for prepare in steps.STEPS}
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("the ranks start", total=num_ranks * (len(outcomes) + 1), visible=False)
        begin = time.monotonic()

        def listen() -> None:
            while not messages.empty():
                message = messages.get()
                (ranks if isinstance(message, Rank) else outcomes[message.step]).append(message)
                progress.advance(task)
            current = next((name for name, of in outcomes.items() if len(of) < num_ranks), "the ranks end")
            progress.update(task, visible=time.monotonic() - begin > PATIENCE_S)
            if len(ranks) == num_ranks:
                progress.update(task, description=current)

        launch(steps.run_all, num_ranks, messages, meanwhile=listen)
        listen()
    return sorted(ranks, key=lambda each: each.rank), [
        sorted(of, key=lambda each: each.rank) for of in outcomes.values()
    ]


def speed(size: int, milliseconds: float) -> str:
    """Bytes per second, in the unit that leaves few digits."""
    rate = 1e3 * size / milliseconds
    unit, name = next((each for each in ((1e9, "GB"), (1e6, "MB")) if rate >= each[0]), (1e3, "kB"))
    return f"{rate / unit:.0f} {name}/s"


def show_ranks(console: Console, ranks: list[Rank]) -> None:
    panels = [
        Panel(f"{each.device}\nprocess {each.process}\nheap of {readable(each.heap_size)}", title=f"rank {each.rank}")
        for each in ranks
    ]
    console.print(Columns(panels))
    console.print(
        "A tensor has the same place in every heap. A kernel names it by its own pointer and says which rank's copy it "
        "means: it then loads and stores in that rank's memory, and no code of that rank takes part."
    )
    ring = " → ".join(str(each.rank) for each in [*ranks, ranks[0]])
    console.print(f"The next rank, below, is the one that follows in the ring {ring}.\n")


def show_outcomes(console: Console, outcomes: list[list[Outcome]], simulated: bool) -> bool:
    """Print a line for each step; True if nothing is wrong on any rank."""
    table = Table(
        "", "step", "what moves", "bytes a rank", "time", "rate", box=None, padding=(0, 1), header_style="dim"
    )
    for column in table.columns[3:]:
        column.justify = "right"
        column.no_wrap = True
    for of in outcomes:
        first, slowest = of[0], max(each.milliseconds for each in of)
        moved, wrong = max(each.moved for each in of), {each.rank: each.wrong for each in of if each.wrong}
        verdict = f" [red]wrong elements, by rank: {wrong}[/]" if wrong else ""
        table.add_row(
            "[red]✗[/]" if wrong else "[green]✓[/]",
            f"[bold]{first.step}[/]\n[cyan]{first.language}[/]",
            first.what + verdict,
            f"{moved:,}".replace(",", " "),
            f"{slowest:.2f} ms" if slowest >= 1 else f"{1e3 * slowest:.1f} µs",
            speed(moved, slowest),
        )
    console.print(table)
    if simulated:
        console.print(
            "[dim]Times are those of the simulator, one processor core a rank; they say nothing about GPUs.[/]"
        )
    console.print()
    return not any(each.wrong for of in outcomes for each in of)
