"""What the broken programs share: their command line. Each is a file with one mistake and its corrected twin.

    python -m iris check tests/sanitizer/broken/relaxed_flag.py               # finds the mistake
    python -m iris check tests/sanitizer/broken/relaxed_flag.py --corrected   # finds nothing

The first lines of a program say what is wrong, ``KIND`` is what the sanitizer has to call it, and ``RANKS`` how many
ranks it needs if not 2. The lines that a report has to name end in ``# first`` and, where there are two, ``# second``:
the access that comes first in the corrected program, and the one after it. Where no order is meant, either.
"""

from collections.abc import Callable

import click

import iris
from iris.spawn import launch

HEAP_SIZE = 1 << 20


def command(main: Callable[[iris.Iris, bool], None]) -> None:
    """Start the ranks, or be one under torchrun, and call ``main(ctx, broken)`` on each."""

    @click.command(help=main.__globals__["__doc__"])
    @click.option("--corrected", is_flag=True, help="Run the twin that has no mistake.")
    def run(corrected: bool) -> None:
        launch(_worker, main.__globals__.get("RANKS", 2), main, not corrected)

    run()


def _worker(main: Callable[[iris.Iris, bool], None], broken: bool) -> None:
    with iris.iris(heap_size=HEAP_SIZE) as ctx:
        main(ctx, broken)
