"""Which variant, and how many programs: from what is equal on all ranks, never from where a tensor lies.

For each collective a table has rows: bytes, variant, programs. The first row is taken that is large enough, and whose
variant can carry the call. A variant is the name of an `Algorithm`. The tables of machines that were measured are in
``collectives.json`` (`iris.machine.tables`). Ranks compare their tables when a group is first used.
"""

import hashlib
import json
from typing import Any, NamedTuple

from iris.ccl.config import Config
from iris.errors import InvalidTableError
from iris.machine import tables


def name_in_table(collective: str, few_sms: bool) -> str:
    """Under which a table has the rows of a collective; it may have others for `Config.few_sms`."""
    return f"{collective} on few SMs" if few_sms else collective


class Choice(NamedTuple):
    """Up to ``limit`` bytes (None: any number): a variant, and how many programs at most (None: its own default)."""

    limit: int | None
    variant: str
    programs: int | None


Table = dict[str, list[Choice]]

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


def name_of_ranks(size: int, num_hosts: int = 1) -> str:
    """Under which a file has the table of ``size`` ranks on each of so many hosts: "8", or "2x8"."""
    return str(size) if num_hosts == 1 else f"{num_hosts}x{size}"


def load_table(device: str, size: int, num_hosts: int = 1) -> Table:
    """The table for ``size`` ranks on devices of this name: measured here, shipped, or `ELSEWHERE`.

    Over several hosts, with ``size`` ranks on each, its variants are "iris" and "vendor", and bytes are those of the
    whole (`iris.ccl.select_over_hosts`). What was not measured is not in it.
    """

    def take(entries: dict[str, Any]) -> Table:
        measured = entries.get(device, {}).get(name_of_ranks(size, num_hosts), {})
        return {name: [Choice(*row) for row in rows] for name, rows in measured.items()}

    table = dict(ELSEWHERE) if num_hosts == 1 else {}
    for _, measured in tables.read(tables.COLLECTIVES, take):
        table |= measured
    return table


def digest(*parts: object) -> str:
    """Of what JSON can hold, to be compared between ranks."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def choose(table: Table, collective: str, nbytes: int, config: Config, possible: set[str]) -> Choice:
    """The first row that reaches as far as ``nbytes`` and whose variant is ``possible`` for this call."""
    rows = table.get(name_in_table(collective, config.few_sms), table[collective])
    reaching = (row for row in rows if row.limit is None or nbytes <= row.limit)
    row = next((row for row in reaching if row.variant in possible), None)
    if row is None:
        raise InvalidTableError(
            f"The table has no row of {collective} for {nbytes} bytes of this type. Its last one should have no limit, "
            f"and be of {' or '.join(sorted(possible))}: make it anew with `python -m iris tune`, or remove "
            f"{tables.COLLECTIVES} from {tables.own_folder()}."
        )
    limits = [number for number in (config.comm_sms, row.programs) if number]
    return row._replace(programs=min(limits, default=None))
