"""Which variant, and how many programs: from what is equal on all ranks, never from where a tensor lies.

A table says it, by collective: up to so many bytes this variant with so many programs, then the next. The tables of
machines that were measured are in ``tables.json``; ``python -m iris tune`` measures the machine at hand and writes its
own to `own_table`. Ranks compare their tables when a group is first used.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from iris.ccl.config import Config
from iris.errors import InvalidTableError
from iris.log import logger


def name_in_table(collective: str, few_sms: bool) -> str:
    """Under which a table has the rows of a collective; it may have others for `Config.few_sms`."""
    return f"{collective} on few SMs" if few_sms else collective


class Choice(NamedTuple):
    """Up to ``limit`` bytes (None: any number): a variant, and how many programs at most (None: its own default)."""

    limit: int | None
    variant: str
    programs: int | None


Table = dict[str, list[Choice]]

SHIPPED = Path(__file__).with_name("tables.json")

# Where nothing was measured. Bytes: of the input, of broadcast's tensor, of one rank's piece where pieces are moved.
ELSEWHERE: Table = {
    "all_reduce": [
        Choice(128 << 10, "one_shot", None),
        Choice(2 << 20, "two_shot_push", None),
        Choice(None, "two_shot", None),
    ],
    "reduce_scatter": [Choice(2 << 20, "one_shot", None), Choice(None, "two_shot", None)],
    "all_gather": [Choice(64 << 10, "one_hop", None), Choice(None, "exchange", None)],
    "all_to_all": [Choice(64 << 10, "one_hop", None), Choice(None, "exchange", None)],
    "broadcast": [
        Choice(64 << 10, "one_hop", None),
        Choice(512 << 10, "exchange", None),
        Choice(None, "deal", None),
        Choice(None, "exchange", None),  # between two ranks, where there is nobody to deal out to
    ],
}


def own_table() -> Path | None:
    """Where ``python -m iris tune`` writes what it measured on this machine; None for a user who has no home."""
    try:
        config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    except RuntimeError:  # HOME is not set, and the system does not know the user
        return None
    return Path(config) / "iris" / "collectives.json"


def load_table(device: str, size: int) -> Table:
    """The table for ``size`` ranks on devices of this name: measured here, shipped, or `ELSEWHERE`."""
    table = dict(ELSEWHERE)
    for file in (SHIPPED, own_table()):
        try:
            text = file.read_text() if file is not None else None
        except (FileNotFoundError, NotADirectoryError) as error:
            if file == SHIPPED:
                raise InvalidTableError(f"{file} is missing: Iris is not installed whole. Install it anew.") from error
            continue
        except OSError as error:
            # Of a home that this user may not enter, too, where there need not be a table.
            logger.info("The table of collectives %s cannot be read (%s): going on without it.", file, error.strerror)
            continue
        if text is None:
            continue
        try:
            measured = json.loads(text).get(device, {}).get(str(size), {})
            table |= {name: [Choice(*row) for row in rows] for name, rows in measured.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidTableError(
                f"{file} is not a table of collectives ({error}). Make it with `python -m iris tune`, or remove it."
            ) from error
    return table


def digest(table: Table) -> str:
    """Of a table, to be compared between ranks."""
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def choose(table: Table, collective: str, nbytes: int, config: Config, possible: set[str]) -> Choice:
    """The first row that reaches as far as ``nbytes`` and whose variant is ``possible`` for this call."""
    rows = table.get(name_in_table(collective, config.few_sms), table[collective])
    reaching = (row for row in rows if row.limit is None or nbytes <= row.limit)
    row = next((row for row in reaching if row.variant in possible), None)
    if row is None:
        raise InvalidTableError(
            f"The table has no row of {collective} for {nbytes} bytes of this type. Its last one should have no limit, "
            f"and be of {' or '.join(sorted(possible))}: make it anew with `python -m iris tune`, or remove "
            f"{own_table()}."
        )
    limits = [number for number in (config.comm_sms, row.programs) if number]
    return row._replace(programs=min(limits, default=None))
