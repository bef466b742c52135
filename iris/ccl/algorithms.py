"""The table of all algorithms, and the choice among them.

| algorithm | collectives | combines | ranks, at least | size, at most | chosen |
| --- | --- | --- | --- | --- | --- |
| `one_hop` | all_gather, all_to_all, broadcast | | 1 | pieces of 256 KiB | by table |
| `exchange` | all_gather, all_to_all, broadcast | | 1 | any | by table |
| | gather, scatter, send, recv | | 1 | any | always |
| `exchange_v` | all_to_all_v | | 1 | any | always |
| `deal`, `pull` | broadcast | | 3 | any | by table |
| `one_shot` | all_reduce, reduce_scatter | floats, any operation | 2 | a share of the workspace | by table |
| `two_shot_push`, `two_shot_direct` | all_reduce | floats, any operation | 2 | a larger share, with room | by table |
| `two_shot`, `pull` | all_reduce, reduce_scatter | all | 1 | any | by table |
| `two_shot` | reduce | all | 1 | any | always |
| `ring` | all_reduce | all | 1 | any | on request |
| `atomic`, `spinlock` | all_reduce | SUM, AVG, PREMUL_SUM of numbers | 1 | any | on request |

Each algorithm's file defines its own rows (`ALGORITHMS`). "By table": `iris.ccl.select` has the tables, which say what
is fastest up to how many bytes. Of their rows the first is taken whose algorithm carries the call, and has room for it.
The choice depends on nothing that may differ between ranks.
"""

from iris.ccl import (
    atomic,
    broadcast,
    exchange,
    exchange_v,
    one_hop,
    one_shot,
    pull,
    ring,
    two_shot,
    two_shot_direct,
    two_shot_push,
)
from iris.ccl.call import Algorithm, Call
from iris.ccl.communicator import Communicator, Launch
from iris.ccl.config import ALL_REDUCE_VARIANTS
from iris.ccl.select import choose
from iris.errors import InvalidConfigError, UnsupportedReductionError

ALGORITHMS: tuple[Algorithm, ...] = tuple(
    algorithm
    for file in (
        one_hop,
        one_shot,
        two_shot_push,
        two_shot_direct,
        exchange,
        exchange_v,
        broadcast,
        two_shot,
        pull,
        ring,
        atomic,
    )
    for algorithm in file.ALGORITHMS
)

# In a group of one rank these are copies, so all_gather does them.
AMONG_ONE = {"gather": "all_gather", "scatter": "all_gather"}

# Both ends of these compare sizes, so they meet for nothing, too.
SIZES_COMPARED = ("gather", "scatter", "send", "recv", "all_to_all_v")


def candidates(comm: Communicator, collective: str, nbytes: int) -> dict[str, Algorithm]:
    """The algorithms that may carry so many bytes (`Call.table_bytes`), by name."""
    return {each.name: each for each in ALGORITHMS if each.carries(comm, collective, nbytes)}


def choose_algorithm(call: Call) -> tuple[Algorithm, int | None]:
    """The algorithm for a call, and how many programs it may have (None: as many as it sees fit).

    Raises
    ------
    InvalidConfigError, UnsupportedReductionError
        The configuration names an algorithm that cannot carry the call.
    """
    comm, config = call.comm, call.config
    if call.collective == "all_reduce" and config.all_reduce_variant != "auto" and comm.size > 1:
        return _requested(call), config.comm_sms
    found = candidates(comm, call.collective, call.table_bytes)
    if call.collective not in comm.table:  # there is one algorithm
        (algorithm,) = found.values()
        return algorithm, config.comm_sms
    possible = {
        name
        for name, each in found.items()
        if (each.dtypes is None or call.elements.dtype in each.dtypes)
        and not any(getattr(config, field) for field in each.unless)
    }
    while True:
        choice = choose(comm.table, call.collective, call.table_bytes, config, possible)
        algorithm = found[choice.variant]
        if algorithm.has_room is None or algorithm.has_room(call, choice.programs):
            return algorithm, choice.programs
        possible.remove(choice.variant)


def _requested(call: Call) -> Algorithm:
    """The algorithm of all_reduce that the configuration names."""
    variant = call.config.all_reduce_variant
    rows = {each.name: each for each in ALGORITHMS if "all_reduce" in each.collectives}
    algorithm = rows[variant]
    limits = f"Config(all_reduce_variant={variant!r}) {algorithm.limits}. Use 'two_shot' or 'auto'."
    if algorithm.dtypes is not None and call.elements.dtype not in algorithm.dtypes:
        raise InvalidConfigError(limits)
    if call.config.batch_invariant and not algorithm.in_rank_order:
        others = [name for name, each in rows.items() if each.in_rank_order and name in ALL_REDUCE_VARIANTS]
        raise InvalidConfigError(
            f"Config(all_reduce_variant={variant!r}, batch_invariant=True) contradicts itself: this variant's order of "
            f"summation depends on the call. Use {' or '.join(map(repr, others))} or 'auto'."
        )
    if algorithm.ops is not None and call.elements.op not in algorithm.ops:
        raise UnsupportedReductionError(limits)
    return algorithm


def prepare(call: Call) -> Launch:
    """A launch on a stream by the algorithm that is chosen, for tensors that lie like these."""
    if call.comm.size == 1:
        call = call._replace(collective=AMONG_ONE.get(call.collective, call.collective))
    if not call.output.numel() and call.collective not in SIZES_COMPARED:
        return _nothing
    algorithm, programs = choose_algorithm(call)
    return algorithm.launch(call, programs)


def _nothing(*_: object) -> None:
    """The launch of a collective of no elements."""
