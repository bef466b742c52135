"""What happens when the root of a collective refuses an argument that it alone gives.

The other ranks see nothing wrong, and would wait for the root. So the root takes part with memory of its own, of the
size that the others' tensors have. Behind that, in the order of its stream, it breaks the group (`iris.runtime.abort`):
a member that has not come yet must not find the group broken before it has taken part. Calls whose arguments are right
pay nothing for this but a broadcast's count.

All ranks give the tensor of a broadcast, so all may refuse it, and then nobody waits. So each member writes to the
memory of the abort flag the number of the last broadcast that it has begun, the sizes of the last few, and the number
of the last that it has refused. A root that refuses one reads there what the others do, and how much they wait for.
"""

import time
from collections.abc import Callable
from typing import NoReturn

import triton

from iris.ccl.communicator import Communicator
from iris.cuda_graphs.capture import GraphLine, Line
from iris.errors import IrisError
from iris.language.dependent_launch import gdc_wait
from iris.language.failures import kind_code
from iris.language.ordering import give_up
from iris.runtime.abort import BEGUN, BEGUN_SIZES, REFUSED, SIZES_KEPT
from iris.runtime.launch import addresses, prepare

# Seconds for which a root watches what the others do. It breaks the group then, and members that come later find it so.
LONGEST_LOOK_S = 10.0


@triton.jit
def break_group(record):
    """Break the group whose device record this is; the host has said why."""
    gdc_wait()
    give_up(record, record, 0, 0, kind=kind_code("refused"), first=0, num_ranks=0)


def refuse(
    comm: Communicator,
    name: str,
    error: IrisError,
    here: bool,
    stream: int | None,
    line: Line,
    take_part: Callable[[], object],
) -> NoReturn:
    """Raise ``error``, which a rank has found; if it is the root of the collective, leave nobody waiting.

    ``here``: whether it is the root. ``take_part``: the same call with memory of the root's own. If that is refused
    too, the other ranks have refused the call as well, and nobody waits. Nor does anybody while a graph is captured.
    """
    if not here or comm.size == 1 or comm.refuses or isinstance(line, GraphLine):
        raise error
    comm.refuses = True
    try:
        take_part()
    except IrisError:
        raise error from None
    finally:
        comm.refuses = False
    _break_behind(comm, name, error, stream)
    raise error


def refuse_broadcast(
    comm: Communicator,
    error: IrisError,
    is_root: bool,
    stream: int | None,
    take_part: Callable[[int], object],
) -> NoReturn:
    """Raise ``error``, with which a broadcast was refused here; if the root alone has refused it, leave nobody waiting.

    ``take_part``: a broadcast of so many bytes of the root's own. Not called while a graph is captured.
    """
    if comm.refuses:
        raise error
    comm.broadcasts += 1
    state, place = comm.state, comm.abort_flag.place
    state[place(REFUSED, comm.rank)] = comm.broadcasts
    if not is_root:
        raise error
    peers = [rank for rank in range(comm.size) if rank != comm.rank]
    deadline = time.monotonic() + LONGEST_LOOK_S
    while True:
        waiting = [peer for peer in peers if state[place(BEGUN, peer)] >= comm.broadcasts]
        late = any(state[place(REFUSED, peer)] < comm.broadcasts for peer in peers)
        if waiting or not late or time.monotonic() > deadline:
            break
        time.sleep(1e-3)
    if not waiting and not late:
        raise error
    size = begun_size(comm, waiting[0]) if waiting else None
    if size is None:
        comm.abort_flag.abort(_why(comm, "broadcast", error))
        raise error
    comm.refuses = True
    try:
        take_part(size)
    finally:
        comm.refuses = False
    _break_behind(comm, "broadcast", error, stream)
    raise error


def begun_size(comm: Communicator, member: int) -> int | None:
    """Bytes of this broadcast as a member has begun it, or None if it has begun so many since that nobody knows.

    On a GPU its host may have enqueued later ones, of other sizes. Sizes are kept for the last `SIZES_KEPT` broadcasts,
    and a size is written before the number of its broadcast. So the size is valid if the number, which is read after
    it, shows that its place has not been reused.
    """
    state, place = comm.state, comm.abort_flag.place
    size = state[place(BEGUN_SIZES + comm.broadcasts % SIZES_KEPT, member)]
    return size if state[place(BEGUN, member)] < comm.broadcasts + SIZES_KEPT - 1 else None


def _break_behind(comm: Communicator, name: str, error: IrisError, stream: int | None) -> None:
    """Break the group behind what is enqueued on the stream."""
    if comm.device.type == "cpu":  # in the simulator, where that is over, and members that wait see the flag
        comm.abort_flag.abort(_why(comm, name, error))
        return
    comm.abort_flag.explain(_why(comm, name, error))
    args = (comm.abort_flag.record_words,)
    prepare(break_group, (1, 1, 1), *args, num_warps=1)(stream, addresses(args))


def _why(comm: Communicator, name: str, error: IrisError) -> str:
    return f"rank {comm.ranks[comm.rank]} is the root of {name}(), and refused it: {error}"
