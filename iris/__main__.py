"""The command line: ``python -m iris info`` and ``python -m iris demo``."""

import click

from iris import requirements
from iris.errors import IrisError


class _Commands(click.Group):
    """Errors of Iris are for the reader: their text and exit status 1, without a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except IrisError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands)
def commands() -> None:
    """One-sided communication between GPUs from inside Triton and Gluon kernels."""


@commands.command()
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def info(as_json: bool) -> None:
    """What this machine has, how Iris would run on it, and what is missing.

    Exit status 1 if Iris cannot run here.
    """
    from iris import info

    report = info.collect()
    info.print_json(report) if as_json else info.show(report)
    if not report["mapping"]["works"]:
        raise SystemExit(1)


@commands.command()
@click.option("--ranks", type=click.IntRange(2), default=2, show_default=True, help="How many ranks to start.")
def demo(ranks: int) -> None:
    """Ranks exchange data from inside Triton and Gluon kernels: on GPUs, or in the simulator.

    Exit status 1 if a rank fails or receives wrong data.
    """
    requirements.check()
    from iris import demo

    if not demo.run(ranks):
        raise SystemExit(1)


def main() -> None:
    commands(prog_name="python -m iris")


if __name__ == "__main__":
    main()
