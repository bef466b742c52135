"""``python -m iris trace``: runs a program with every kernel traced, and shows what its ranks did."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from iris.commands.files import check_writable
from iris.commands.program import as_command, running
from iris.commands.shared_folder import await_, leave, shared_folder
from iris.errors import names
from iris.language.tracing import VARIABLE
from iris.tracing import between_nodes, chrome, picture, summary
from iris.tracing.between_nodes import FAILED_S, TAKEN_S, FileExchange
from iris.tracing.rank_recording import Recording
from iris.tracing.recording import EVENTS_VARIABLE, FOLDER_VARIABLE
from iris.tracing.timeline import Timeline, assemble

NO_STORE = " Recordings of other nodes come through the store of torchrun's agents, and this torchrun has none."

# The file by which rank 0 tells other ranks of its node that it has shown the trace.
SHOWN = "shown"


def run(command: Sequence[str], out: Path, image: Path | None, max_events: int) -> int:
    """Run the program traced, on each rank; rank 0 shows what all have recorded.

    ``command``: the `iris.commands.program.command_line` of the program. Returns the exit status of the program; 1 if
    nothing was recorded.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    for path in filter(None, (out, image)) if rank == 0 else ():
        check_writable(path)
    # The ranks of a node are consecutive. Those of other nodes share no folder with rank 0.
    of_this_node = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    store = between_nodes.store() if of_this_node < size else None
    with as_command(), shared_folder("iris-trace") as folder, FileExchange(store, rank) as exchange:
        settings = {VARIABLE: "1", FOLDER_VARIABLE: str(folder), EVENTS_VARIABLE: str(max_events)}
        with running(command, settings) as process:
            status = process.wait()
        on_first_node = os.environ.get("GROUP_RANK", "0") == "0"
        if not on_first_node:
            exchange.send(sorted(folder.glob(f"rank{rank}.*.npz")), failed=status != 0)
        leave(folder / f"over{rank}", status)

        def are_over() -> bool:
            return len(list(folder.glob("over*"))) == of_this_node

        if rank:
            if status and on_first_node:
                # torchrun ends all ranks of the node when this command ends by an error. Rank 0 shows the trace before.
                begin = time.monotonic()
                await_(
                    lambda: (
                        (folder / SHOWN).exists() or time.monotonic() - begin > (TAKEN_S if are_over() else FAILED_S)
                    )
                )
            return status
        await_(are_over)
        exchange.take(range(of_this_node, size), folder, failed=status != 0)
        timeline = assemble([Recording.load(file) for file in sorted(folder.glob("rank*.npz"))])
        console = Console()
        if status:
            console.print(f"The program has failed, with exit status {status}.")
        missing = sorted(set(range(size)) - timeline.devices.keys())
        if 0 < len(missing) < size:
            lost = store is None and missing[-1] >= of_this_node
            console.print(f"Nothing has come from {names(missing)}.{NO_STORE if lost else ''}")
        if timeline.events:
            show(timeline, out, image, console)
        else:
            console.print(
                "Nothing was recorded: no kernel has used a device context, iris.load, iris.store ... or a collective."
            )
        leave(folder / SHOWN, 0)
        return status or int(not timeline.events)


def show(timeline: Timeline, out: Path, image: Path | None, console: Console) -> None:
    """Write the trace, and a picture if asked for, and print the summary."""
    chrome.write(timeline, out)
    summary.show(timeline, console)
    if image is not None:
        picture.draw(timeline, image)
        console.print(f"Picture: {image}")
    console.print(f"Trace: {out}, for https://ui.perfetto.dev")
