"""Measures this machine, and writes the tables by which operations are chosen here.

Of collectives: which variant is fastest. Of fused operations: the figures that predict their times, by
`iris.bench.figures`.
"""

import contextlib
import itertools
import json
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from iris.bench import figures
from iris.bench.collectives import COLLECTIVES, iris_calls, microseconds_of_each, ready
from iris.bench.repetitions import repetitions
from iris.bench.timing import Operands, counts
from iris.ccl import algorithms
from iris.ccl.communicator import Communicator, gpu_name
from iris.ccl.config import FEW_SMS, Config
from iris.ccl.select import Choice, Table, name_in_table, name_of_ranks
from iris.ccl.select_over_hosts import IRIS, VENDOR
from iris.commands.files import check_writable, written
from iris.context import Iris, iris
from iris.errors import FolderError, InvalidTableError
from iris.machine.figures import find
from iris.machine.tables import COLLECTIVES as COLLECTIVES_FILE
from iris.machine.tables import OPERATIONS as OPERATIONS_FILE
from iris.machine.tables import own_folder

# The programs to try for variants that are bound by the link: of `FEW_SMS`, fewer may be faster.
PROGRAMS = (32, 64, 128)
FEW_PROGRAMS = (16, FEW_SMS)
# Variants that cannot carry any size.
SMALL = {algorithm.name for algorithm in algorithms.ALGORITHMS if algorithm.fits}
# How many times as fast another choice has to be for a row of its own. Less may be noise.
MARGIN = 1.03

Pick = tuple[str, int | None]
"""A variant, and the programs it runs with (None: its own default)."""
Measured = dict[int, dict[Pick, float]]
"""Microseconds of every pick, by bytes."""


def bytes_in_table(num_ranks: int, collective: str, nbytes: int) -> int:
    """By how many bytes `iris.ccl.select` looks up a call of ``nbytes`` in all: of some collectives, a rank's part."""
    return nbytes // num_ranks if collective in ("all_gather", "all_to_all") else nbytes


def run(sizes: list[int], out: Path | None) -> list[str]:
    """``python -m iris tune`` on one rank. Nothing can be wrong with what it finds."""
    folder = out or own_folder()
    if folder is None:
        raise FolderError(
            "The tables have no place: HOME is not set, and the system does not know this user. Give --out."
        )
    for name in (COLLECTIVES_FILE, OPERATIONS_FILE):
        check_writable(folder / name)
        entries(folder / name)
    with iris(4 * sizes[-1] + (64 << 20)) as ctx:
        device, is_first, size = gpu_name(ctx.device), ctx.cur_rank == 0, ctx.num_ranks

        def report(line: str) -> None:
            if is_first:
                click.echo(line)

        hosts, ranks_each = ctx.num_hosts, ctx.num_local_ranks
        table = tune(ctx, sizes, report) if hosts == 1 else tune_over_hosts(ctx, sizes, report)
        if is_first:
            write(folder / COLLECTIVES_FILE, table, device, name_of_ranks(ranks_each, hosts))
        report(f"Written to {folder / COLLECTIVES_FILE}")
        if hosts > 1:
            report("What is within a host is tuned there: start this command on one.")
            return []
        problem = figures.problem(ctx)
    if problem:
        report(f"Figures of fused operations stay as they are: {problem}.")
        return []
    with iris(figures.HEAP_BYTES) as ctx:
        measured = figures.measure(ctx, figures.timer(ctx))
    if is_first:
        write(folder / OPERATIONS_FILE, figures.entry(measured, find(device), size), device)
    for name, value in measured.items():
        report(f"{name}: {value}")
    report(f"Written to {folder / OPERATIONS_FILE}, with the other figures as they were")
    return []


def tune(ctx: Iris, sizes: list[int], report: Callable[[str], None]) -> Table:
    """The table for this machine and number of ranks. Collective over the world; uses bf16 tensors on the heap."""
    ctx.ccl.barrier()
    communicator = ctx.ccl.communicator()
    before = communicator.table
    table: Table = {}
    try:
        for sms in (None, FEW_SMS):
            found: dict[str, Measured] = {name: {} for name in COLLECTIVES}
            for nbytes in sizes:
                measure(ctx, found, COLLECTIVES, nbytes, sms, before, report)
            for nbytes, names in between(found).items():
                measure(ctx, found, names, nbytes, sms, before, report)
            for name, measured in found.items():
                limits = [
                    (bytes_in_table(ctx.num_ranks, name, nbytes), measured[nbytes]) for nbytes in sorted(measured)
                ]
                table[name_in_table(name, sms is not None)] = rows(cheapest(limits), before[name])
    finally:
        communicator.table = before
        communicator.forget()
    return table


def measure(
    ctx: Iris,
    found: dict[str, Measured],
    names: Sequence[str],
    nbytes: int,
    sms: int | None,
    before: Table,
    report: Callable[[str], None],
) -> None:
    """Put the times of each pick of these collectives into ``found``. The communicator has another table afterwards."""
    communicator = ctx.ccl.communicator()
    operands = Operands(*(ctx.randn(n, dtype=torch.bfloat16) for n in counts(nbytes, 2, ctx.num_ranks)))
    calls = iris_calls(ctx, operands, Config(comm_sms=sms))
    for name in names:
        call, key = calls[name], name_in_table(name, sms is not None)
        readied: dict[Pick, Any] = {}
        kept = []
        often = repetitions(ctx, call, nbytes)
        for variant, programs in candidates(communicator, name, nbytes, sms is None):
            communicator.table = before | {key: [Choice(None, variant, programs)]}
            # Graphs need what the launches in them keep alive.
            kept.append(communicator.launches)
            communicator.forget()
            # Without room for its memory, outside a graph or in one, a variant has no row. That is so on all ranks.
            with contextlib.suppress(InvalidTableError):
                # Compiled and loaded first, outside the graph.
                call()
                # The simulator has no graphs: there all are timed as calls, by the table that is set last.
                readied[variant, programs] = ready(ctx, call, often)
        times = dict(zip(readied, microseconds_of_each(ctx, list(readied.values()), often), strict=True))
        del readied, kept
        ctx.ccl.release_graphs()
        variant, programs = fastest(times)
        report(f"{key}, {nbytes} bytes: {variant}, {programs or 'default'} programs, {times[variant, programs]:.2f} us")
        found[name][nbytes] = times


def fastest(times: dict[Pick, float]) -> Pick:
    return min(times, key=times.__getitem__)


def between(found: dict[str, Measured]) -> dict[int, list[str]]:
    """Sizes that are 3/2 of a measured one, with the collectives of which another variant is fastest at the next."""
    wanted: dict[int, list[str]] = defaultdict(list)
    for name, measured in found.items():
        for size, larger in itertools.pairwise(measured):
            middle = size * 3 // 2
            if fastest(measured[size])[0] != fastest(measured[larger])[0] and size < middle < larger:
                wanted[middle].append(name)
    return wanted


def tune_over_hosts(ctx: Iris, sizes: list[int], report: Callable[[str], None]) -> Table:
    """Iris' steps or the vendor's collective, for as many hosts and ranks. Collective over the world; of bf16 tensors.

    Its limits are bytes of the whole; see `iris.ccl.select_over_hosts`.
    """
    found: dict[str, list[tuple[int, dict[Pick, float]]]] = {name: [] for name in COLLECTIVES}
    for nbytes in sizes:
        operands = Operands(*(ctx.randn(n, dtype=torch.bfloat16) for n in counts(nbytes, 2, ctx.num_ranks)))
        choices = {(who, None): iris_calls(ctx, operands, Config(over_hosts=who)) for who in (IRIS, VENDOR)}
        for name in COLLECTIVES:
            for calls in choices.values():
                # Compiled, and connected, first, outside the graph.
                calls[name]()
            often = repetitions(ctx, choices[IRIS, None][name], nbytes)
            readied = [ready(ctx, calls[name], often) for calls in choices.values()]
            times: dict[Pick, float] = dict(zip(choices, microseconds_of_each(ctx, readied, often), strict=True))
            del readied
            ctx.ccl.release_graphs()
            report(f"{name}, {nbytes} bytes: {', '.join(f'{who} {time:.2f} us' for (who, _), time in times.items())}")
            found[name].append((operands.whole.nbytes, times))
    return {name: rows(cheapest(times_by_size), []) for name, times_by_size in found.items()}


def candidates(comm: Communicator, collective: str, nbytes: int, all_sms: bool) -> list[Pick]:
    """Variants that can carry so much in this group, each with the numbers of programs to try."""
    found: list[Pick] = []
    for variant in algorithms.candidates(comm, collective, bytes_in_table(comm.size, collective, nbytes)):
        numbers: tuple[int | None, ...] = (None,)
        if nbytes >= 1 << 20 and variant not in SMALL:
            numbers = PROGRAMS if all_sms else FEW_PROGRAMS
        elif nbytes >= 1 << 20 and all_sms:
            # Two programs a multiprocessor are their default; one of them may do.
            numbers = (None, PROGRAMS[-1])
        found += [(variant, programs) for programs in numbers]
    return found


def cheapest(measured: list[tuple[int, dict[Pick, float]]]) -> list[tuple[int, str, int | None]]:
    """A pick for each size: those with the smallest product of their times, and of `MARGIN` for each change.

    ``measured``: of each size, smallest first, its limit in the table and the microseconds of every pick. By the
    Viterbi algorithm, with logarithms: the picks that end in this one are the best that ended in it before, or in any.
    """
    ending: dict[Pick, tuple[float, list[tuple[int, str, int | None]]]] = {}
    cost = operator.itemgetter(0)
    for limit, times in measured:
        before, picks = min(ending.values(), key=cost, default=(0.0, []))
        changed = before + math.log(MARGIN), picks
        longer = {}
        for pick, time in times.items():
            before, picks = min(ending.get(pick, changed), changed, key=cost)
            longer[pick] = before + math.log(time), [*picks, (limit, *pick)]
        ending = longer
    return min(ending.values(), key=cost)[1]


def rows(found: list[tuple[int, str, int | None]], before: list[Choice]) -> list[Choice]:
    """Neighbouring sizes with the same winner as one row; after the last, what carries any size and type."""
    table: list[Choice] = []
    for limit, variant, programs in found:
        if table and table[-1][1:] == (variant, programs):
            table.pop()
        table.append(Choice(limit, variant, programs))
    if table[-1].variant not in SMALL:
        table[-1] = table[-1]._replace(limit=None)
    return [*table, *(row for row in before if row.limit is None and row.variant != table[-1].variant)]


def entries(file: Path) -> dict[str, dict[str, Any]]:
    """What is in ``file``, by the GPU's name; nothing, if there is no such file yet.

    Raises `InvalidTableError` if nothing can be added to it.
    """
    try:
        found = json.loads(file.read_bytes()) if file.exists() else {}
        if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
            raise ValueError("it has no objects by the GPU's name")
    except ValueError as error:
        raise InvalidTableError(f"{file} is no table that Iris can add to: {error}. Remove it.") from error
    return found


def write(file: Path, entry: object, *place: str) -> None:
    """Put ``entry`` at this place, a key in each object on the way, of the `entries` of ``file``."""
    tables = entries(file)
    *outer, last = place
    within: dict[str, Any] = tables
    for key in outer:
        within = within.setdefault(key, {})
    within[last] = entry
    with written(file):
        file.write_text(json.dumps(tables, indent=1) + "\n")
