"""What happens when the root of a collective refuses an argument that the other ranks have nothing to say against.

They would wait for the root. So the root takes part with memory of its own, of the size that the others' tensors have:
kernels on a GPU do not look whether the group is broken. After that, in the order of its stream, it breaks the group
(`iris.runtime.abort`).

All ranks may refuse the call, and then nobody waits, and the group goes on. So each member writes to the memory of the
abort flag how many rooted collectives it has called, and of the last few what size they have, or that it has refused
them. A root that refuses one reads there what the others do, and how much they wait for. Calls whose arguments are
right pay two stores for this.
"""

import time
from collections.abc import Callable
from typing import NoReturn

import torch
import triton

from iris.ccl.communicator import Communicator
from iris.errors import IrisError
from iris.language.dependent_launch import gdc_wait
from iris.language.failures import kind_code
from iris.language.ordering import give_up
from iris.runtime.abort import CALLED, SIZES, SIZES_KEPT
from iris.runtime.launch import addresses, prepare

# Seconds for which a root watches what the others do. It breaks the group then, and members that come later find it so.
LONGEST_LOOK_S = 10.0

# Of what a collective moves as it is, the bytes alone count; of what it combines, the dtype too, by its place here. All
# ranks run the same version of torch.
MOVED = torch.uint8
DTYPES = (MOVED, *sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)} - {MOVED}, key=str))
NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}

# What a member does in a call, where it has not begun one of a size that is known: it has not come yet, has refused it,
# or has made so many calls since that nobody knows.
LATE, REFUSED, UNKNOWN = -3, -2, -1


@triton.jit
def break_group(record):
    """Break the group whose device record this is; the host has said why."""
    gdc_wait()
    give_up(record, record, 0, 0, kind=kind_code("refused"), first=0, num_ranks=0)


def begin(comm: Communicator, data: torch.Tensor, dtype: torch.dtype = MOVED) -> None:
    """Tell the other members that this one begins its next rooted collective, in which each gives or gets ``data``.

    A root that has refused the call takes part with another one, which is no call of its own.
    """
    if not comm.refuses:
        _note_size(comm, data.nbytes * len(DTYPES) + NUMBERS[dtype])


def refuse(
    comm: Communicator,
    name: str,
    error: IrisError,
    is_root: bool,
    stream: int | None,
    capturing: bool,
    take_part: Callable[[int, torch.dtype], object],
) -> NoReturn:
    """Raise ``error``, with which a collective was refused here. If the root alone refused it, leave nobody waiting.

    ``take_part``: the same call with memory of the root's own, for so many bytes of each rank. A call that is captured
    in a graph does not run yet, so nobody waits for it.
    """
    if comm.refuses or comm.size == 1:
        raise error
    _note_size(comm, REFUSED)
    if not is_root or capturing:
        raise error
    peers = [rank for rank in range(comm.size) if rank != comm.rank]
    deadline = time.monotonic() + LONGEST_LOOK_S
    while True:
        sizes = [size_of_call(comm, peer) for peer in peers]
        if max(sizes) > REFUSED or LATE not in sizes or time.monotonic() > deadline:
            break
        time.sleep(1e-3)
    if set(sizes) == {REFUSED}:
        raise error
    if (size := max(sizes)) < 0:
        comm.abort_flag.abort(_why(comm, name, error))
        raise error
    comm.refuses = True
    try:
        take_part(size // len(DTYPES), DTYPES[size % len(DTYPES)])
    except IrisError:
        # What the root asked for besides does not fit what the others give.
        comm.abort_flag.abort(_why(comm, name, error))
        raise error from None
    finally:
        comm.refuses = False
    _break_after_call(comm, name, error, stream)
    raise error


def size_of_call(comm: Communicator, member: int) -> int:
    """What this rank's last rooted collective is to a member: `LATE`, `REFUSED`, `UNKNOWN` or its size, as in `begin`.

    On a GPU the member's host may have enqueued later ones. Sizes are kept for the last `SIZES_KEPT` calls, and a size
    is written before the number of its call. So it is valid if the number, which is read after it, shows that its place
    has not been reused.
    """
    state, place = comm.state, comm.abort_flag.place
    if state[place(CALLED, member)] < comm.rooted:
        return LATE
    size = state[place(SIZES + comm.rooted % SIZES_KEPT, member)]
    return size if state[place(CALLED, member)] < comm.rooted + SIZES_KEPT - 1 else UNKNOWN


def _note_size(comm: Communicator, size: int) -> None:
    comm.rooted += 1
    # In this order: see `size_of_call`.
    comm.state[comm.sizes + comm.rooted % SIZES_KEPT] = size
    comm.state[comm.called] = comm.rooted


def _break_after_call(comm: Communicator, name: str, error: IrisError, stream: int | None) -> None:
    """Break the group after what is enqueued on the stream."""
    if comm.device.type == "cpu":  # in the simulator, where that is over, and members that wait see the flag
        comm.abort_flag.abort(_why(comm, name, error))
        return
    comm.abort_flag.explain(_why(comm, name, error))
    args = (comm.abort_flag.record_words,)
    prepare(break_group, (1, 1, 1), *args, num_warps=1)(stream, addresses(args))


def _why(comm: Communicator, name: str, error: IrisError) -> str:
    return f"rank {comm.ranks[comm.rank]} is the root of {name}(), and refused it: {error}"
