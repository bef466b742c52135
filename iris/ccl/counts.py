"""Counts and displacements of `all_to_all_v` as its kernel reads them: rows of int64 on the device, one word a rank.

Each stream has a table of the numbers that it has used, so a call with the same numbers copies nothing. A full table is
filled again from the start. What is written over has been read by then, since the copies are on the stream whose
kernels read the table. A graph copies its numbers in each replay, to memory of the graph.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from iris.ccl import checks
from iris.ccl.communicator import Communicator
from iris.cuda_graphs.capture import GraphLine, Line
from iris.cuda_graphs.kept import keep
from iris.errors import InvalidCollectiveError

NAMES = ("send_counts", "send_displs", "recv_counts", "recv_displs")
# Rows of numbers in a stream's table: so many sets of four.
MOST = 512


class Numbers(NamedTuple):
    """One set of counts and displacements.

    ``host``: int64 ``[4, W]``, pinned. ``device``: its rows on the device, or None in a graph. ``sent``, ``received``:
    how many elements of input and of output are used, and which rank the last of them belongs to.
    """

    host: torch.Tensor
    device: tuple[torch.Tensor, ...] | None
    sent: tuple[int, int]
    received: tuple[int, int]


class Table:
    """The numbers of one stream, or of a line of graphs."""

    def __init__(self, comm: Communicator, captured: bool) -> None:
        shape = (MOST, 4, comm.size)
        device = comm.device
        self._comm = comm
        self._memory = None if captured else keep(lambda: torch.empty(shape, dtype=torch.int64, device=device), device)
        self._numbers: dict[tuple, Numbers] = {}

    def find(self, numbers: tuple[tuple[int, ...], ...]) -> Numbers:
        if numbers not in self._numbers:
            self._numbers[numbers] = self._make(numbers)
        return self._numbers[numbers]

    def _make(self, numbers: tuple[tuple[int, ...], ...]) -> Numbers:
        comm = self._comm
        # Where others wait, the kernel refuses it, as what is unequal between two ranks: so that they know.
        if numbers[0][comm.rank] != numbers[2][comm.rank] and (comm.size == 1 or self._memory is None):
            raise InvalidCollectiveError(
                f"all_to_all_v(): rank {comm.ranks[comm.rank]} sends {numbers[0][comm.rank]} elements to itself "
                f"and receives {numbers[2][comm.rank]}."
            )
        # Pinned, so that the copy does not block the host. Graphs need it as long as they are replayed.
        host = torch.tensor(numbers, dtype=torch.int64, pin_memory=comm.device.type == "cuda")
        rows = None
        if self._memory is not None:
            if len(self._numbers) == MOST:
                self._numbers.clear()
            place = self._memory[len(self._numbers)]
            rows = place.copy_(host, non_blocking=True).unbind()
        return Numbers(host, rows, *map(checks.end, numbers[::2], numbers[1::2]))


def on_device(
    comm: Communicator,
    lists: tuple[Sequence[int] | torch.Tensor, ...],
    output: torch.Tensor,
    input: torch.Tensor,
    line: Line,
) -> tuple[torch.Tensor, ...]:
    """The four ``lists``, in the order of `NAMES`, checked and on the device."""
    check_contiguous(output, input)
    if checks.DEBUGGING and not isinstance(line, GraphLine):
        checks.compare_counts(comm, lists[0], lists[2])
    if isinstance(lists[0], torch.Tensor) and lists[0].device.type == "cuda":
        return checks.check_rows(comm, lists)
    numbers = on_host(comm, lists)
    if line not in comm.tables:
        comm.tables[line] = Table(comm, isinstance(line, GraphLine))
    found = comm.tables[line].find(numbers)
    check_inside(comm, found.sent, found.received, output, input)
    if found.device is None:
        return found.host.to(comm.device, non_blocking=True).unbind()
    return found.device


def on_host(comm: checks.Ranks, lists: Sequence[Sequence[int] | torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """The four ``lists`` as numbers. Blocks the host, if they are on the device."""
    return tuple(checks.counts(name, values, comm.size) for name, values in zip(NAMES, lists, strict=True))


def check_contiguous(output: torch.Tensor, input: torch.Tensor) -> None:
    """That elements can be counted in the order of memory, and are there what they are."""
    for role, tensor in (("input", input), ("output", output)):
        if tensor.is_conj() or tensor.is_neg():
            raise InvalidCollectiveError(
                f"all_to_all_v() moves what is in memory, and its {role} is a view of that with the other sign, as "
                "x.conj() is. Pass x.resolve_conj().resolve_neg()."
            )
    if not (input.is_contiguous() and output.is_contiguous()):
        raise InvalidCollectiveError(
            "all_to_all_v() counts elements in the order of memory, so input and output must be contiguous; the "
            f"strides are {input.stride()} and {output.stride()}. Pass x.contiguous()."
        )


def check_inside(
    comm: checks.Ranks, sent: tuple[int, int], received: tuple[int, int], output: torch.Tensor, input: torch.Tensor
) -> None:
    """That the tensors reach as far as what is sent and received: where its last element ends, and whose that is."""
    for what, limit, (end, rank) in (("input", input.numel(), sent), ("output", output.numel(), received)):
        if end > limit:
            raise InvalidCollectiveError(
                f"all_to_all_v(): the elements for rank {comm.ranks[rank]} end at {end}, and the {what} has {limit}."
            )
