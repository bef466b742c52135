"""What options of the benchmarks take, checked before anything runs."""

import json
import math
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import click

from iris.errors import UnknownChoiceError, short_repr

DTYPES = click.Choice(["float16", "bfloat16", "float32"])
# Of the matrices that are multiplied.
MATRIX_DTYPES = click.Choice([*DTYPES.choices, "float8_e4m3fn"])


def num_ranks(fewest: int = 1, default: int | None = None) -> Callable:
    """The option ``--num-ranks``. Without a ``default`` it is None if not given: `iris.bench.ranks` chooses then."""
    choice = "If not given, one for each GPU of this machine, and 2 in the simulator. " if default is None else ""
    return click.option(
        "-r",
        "--num-ranks",
        type=click.IntRange(fewest),
        default=default,
        show_default=default is not None,
        help=f"How many ranks to start. {choice}Ignored under torchrun.",
    )


def check_choices(*options: tuple[str, Iterable[str], Collection[str]]) -> None:
    """Raise `UnknownChoiceError` unless the values of each option, ``(name, values, choices)``, are choices of it."""
    for name, values, choices in options:
        for value in values:
            if value not in choices:
                raise UnknownChoiceError(name, value, choices)


class Floors(click.Path):
    """A file of floors, as `iris.bench.report.below_floor` reads it: device → benchmark → ranks → figure → bound."""

    LEVELS = 4

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, parameter, context)))
        try:
            floors = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            self.fail(f"{str(path)!r} is not JSON that can be read: {error}.", parameter, context)
        if not _are_bounds(floors, self.LEVELS):
            self.fail(
                f"{str(path)!r} has no floors. They are numbers by device, benchmark, ranks and figure, one object in "
                'the other: {"NVIDIA H200": {"ccl": {"2": {"all_reduce_8KiB_us": 4.5}}}}.',
                parameter,
                context,
            )
        return path


def _are_bounds(found: object, levels: int) -> bool:
    """Whether they are numbers, in so many objects."""
    if not levels:
        return isinstance(found, int | float) and not isinstance(found, bool)
    return isinstance(found, dict) and all(_are_bounds(each, levels - 1) for each in found.values())


class Rate(click.ParamType):
    """A rate in GB/s or TFLOPS: above 0, and no more than `MOST`, which leaves out NaN and infinity."""

    name = "rate"
    MOST = 1e6

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> float:
        try:
            rate = float(str(value))
        except ValueError:
            rate = math.nan
        if not 0 < rate <= self.MOST:
            self.fail(f"{value!r} is not possible; it takes a number above 0, up to {self.MOST:g}.", parameter, context)
        return rate


class Sizes(click.ParamType):
    """Numbers of KiB with commas between, such as ``1,1.5``; as whole numbers of bytes."""

    MOST = (1 << 31) - 1

    name = "sizes"

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> tuple:
        if isinstance(value, tuple):
            return value
        try:
            nbytes = [1024 * float(number) for number in str(value).split(",")]
        except ValueError:
            nbytes = [math.nan]
        if not all(1 <= each <= 1024 * self.MOST and each.is_integer() for each in nbytes):
            self.fail(
                f"{short_repr(value)} is not possible; it takes numbers of KiB with ',' between, of whole bytes, up to "
                f"{self.MOST}.",
                parameter,
                context,
            )
        return tuple(map(int, nbytes))


class Numbers(click.ParamType):
    """Whole numbers with a separator between them, each of which is ``least`` or more, and no more than `MOST`."""

    MOST = (1 << 31) - 1

    name = "numbers"

    def __init__(self, separator: str, least: int, count: int | None = None) -> None:
        self.separator, self.least, self.count = separator, least, count

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> tuple:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(map(int, str(value).split(self.separator)))
        except ValueError:
            numbers = ()
        as_many = bool(numbers) and len(numbers) == (self.count or len(numbers))
        if not as_many or not self.least <= min(numbers) <= max(numbers) <= self.MOST:
            kind = f"{self.count} whole numbers" if self.count else "whole numbers"
            most = f", up to {self.MOST}" if numbers and max(numbers) > self.MOST else ""
            self.fail(
                f"{short_repr(value)} is not possible; it takes {kind} from {self.least} on{most}, with "
                f"{self.separator!r} between.",
                parameter,
                context,
            )
        return numbers
