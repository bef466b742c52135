"""all_to_all_v over several hosts: what is for the ranks of another host goes along the rail, and is dealt out there.

1. All ranks gather each other's counts on the host. It has to know them: what a rank passes on within its host are
   blocks of which neither sender nor receiver are this rank. So the host waits here for what is enqueued before, and a
   CUDA graph cannot capture it.
2. Every rank compares all counts, and all raise alike if a sender and its receiver do not agree. Nothing has moved.
3. The rail brings from each other host what its rank has for the ranks of this one. Meanwhile the ranks of the host
   exchange what they have for each other.
4. What has come from each host is exchanged within this one, straight to where the receiver wants it.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from iris.ccl import checks, counts
from iris.ccl.span import Span
from iris.compat.cuda import is_current_stream_capturing
from iris.errors import IrisError, MismatchedCollectiveError, SeveralHostsError

Lists = tuple[Sequence[int] | torch.Tensor, ...]
"""Counts and displacements, in the order of `counts.NAMES`."""


class Agreed(NamedTuple):
    """Counts of elements. ``sends[s][d]``: what rank s sends to rank d; the others are this rank's own."""

    sends: list[list[int]]
    send_displs: tuple[int, ...]
    recv_displs: tuple[int, ...]


def exchange_over_hosts(span: Span, output: torch.Tensor, input: torch.Tensor, lists: Lists) -> None:
    """Both tensors are contiguous, and of one dtype on all ranks. Blocks the host."""
    if span.device.type == "cuda" and is_current_stream_capturing():
        raise SeveralHostsError(
            "ctx.ccl.all_to_all_v() in the capture of a CUDA graph",
            "Use all_to_all, with parts of equal size, or call it outside of the capture.",
        )
    agreed = _agree(span, output, input, lists)
    call = f"all_to_all_v() of {input.dtype}"
    hosts, sends = span.hosts, agreed.sends
    others = [host for host in range(len(hosts)) if host != hosts.number]
    # How much comes from each host, and how much goes there, along this rail.
    comes, goes = [0] * len(hosts), [0] * len(hosts)
    for host in others:
        comes[host] = sum(sends[hosts.rail[host]][rank] for rank in hosts.local_ranks)
        goes[host] = sum(sends[span.rank][rank] for rank in hosts.ranks[host])
    arrived, sent = input.new_empty(sum(comes)), _packed(span, input, agreed, others)
    on_rail = sum(sends[source][rank] for source in hosts.rail for rank in _on_other_hosts(span, source))
    wait = span.rail.all_to_all_v(arrived, sent, comes, goes, on_rail * input.itemsize, call)
    own = hosts.local_ranks
    _within(span, output, input, [sends[span.rank][to] for to in own], [agreed.send_displs[to] for to in own], agreed)
    wait()
    for host, part in zip(range(len(hosts)), arrived.split(comes), strict=True):
        if host != hosts.number:
            numbers = [sends[hosts.rail[host]][to] for to in own]
            _within(span, output, part, numbers, [0, *accumulate(numbers[:-1])], agreed, host)


def _agree(span: Span, output: torch.Tensor, input: torch.Tensor, lists: Lists) -> Agreed:
    """The counts of all ranks. Raises on all of these if they do not agree, or if a rank has refused its own."""
    size = span.size
    refused: IrisError | None = None
    itemsize = 0
    try:
        # What is no tensor at all is refused here, too: the others are to know.
        checks.check_tensor("all_to_all_v", input)
        itemsize = input.itemsize
        checks.check_pair(span, "all_to_all_v", output, input, None, None)
        counts.check_contiguous(output, input)
        checks.check_overlap("all_to_all_v", output, input)
        numbers = counts.on_host(span, lists)
        sent, received = map(checks.end, numbers[::2], numbers[1::2])
        counts.check_inside(span, sent, received, output, input)
    except IrisError as error:
        refused, numbers = error, ((0,) * size,) * 4
    row = [0 if refused is None else 1, itemsize, *numbers[0], *numbers[2]]
    mine = torch.tensor(row, dtype=torch.int64).to(span.device)
    gathered = mine.new_empty(size, len(mine))
    span.all_gather(gathered, mine, "the counts of all_to_all_v()")
    everyone = gathered.tolist()
    if refused is not None:
        raise refused
    refusing = [span.ranks[rank] for rank, row in enumerate(everyone) if row[0]]
    if refusing:
        raise MismatchedCollectiveError(
            f"all_to_all_v(): rank {', '.join(map(str, refusing))} could not use its own arguments, and has raised an "
            "error that says why. Nothing was sent."
        )
    itemsizes = {rank: row[1] for rank, row in zip(span.ranks, everyone, strict=True)}
    if len(set(itemsizes.values())) > 1:
        each = ", ".join(f"{nbytes} on rank {rank}" for rank, nbytes in itemsizes.items())
        raise MismatchedCollectiveError(
            f"all_to_all_v() takes tensors of one dtype on all ranks; of bytes an element has {each}. Nothing was sent."
        )
    sends, expects = ([row[begin : begin + size] for row in everyone] for begin in (2, 2 + size))
    wrong = [
        f"rank {span.ranks[source]} sends {sends[source][to]} elements to rank {span.ranks[to]}, which expects "
        f"{expects[to][source]}"
        for source in range(size)
        for to in range(size)
        if sends[source][to] != expects[to][source]
    ]
    if wrong:
        more = f", and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise MismatchedCollectiveError(
            f"The counts of all_to_all_v() do not agree: {'; '.join(wrong[:MOST_NAMED])}{more}. Nothing was sent."
        )
    return Agreed(sends, numbers[1], numbers[3])


# Pairs of ranks whose counts differ, in an error.
MOST_NAMED = 4


def _on_other_hosts(span: Span, rank: int) -> list[int]:
    here = span.hosts.host_of(rank)
    return [other for other in range(span.size) if span.hosts.host_of(other) != here]


def _packed(span: Span, input: torch.Tensor, agreed: Agreed, others: Sequence[int]) -> torch.Tensor:
    """What is for the ranks of other hosts, by host and local rank."""
    flat, pieces = input.view(-1), []
    for host in others:
        for rank in span.hosts.ranks[host]:
            begin = agreed.send_displs[rank]
            pieces.append(flat[begin : begin + agreed.sends[span.rank][rank]])
    return torch.cat(pieces)


def _within(
    span: Span,
    output: torch.Tensor,
    source: torch.Tensor,
    numbers: Sequence[int],
    displs: Sequence[int],
    agreed: Agreed,
    host: int | None = None,
) -> None:
    """Exchange within this host what the ranks of a ``host`` (None: this one) have for its ranks.

    ``numbers``, ``displs``: of what is in ``source`` for each rank of this host.
    """
    senders = span.hosts.ranks[span.hosts.number if host is None else host]
    comes = [agreed.sends[sender][span.rank] for sender in senders]
    places = [agreed.recv_displs[sender] for sender in senders]
    span.within.all_to_all_v(output, source, numbers, displs, comes, places, group=span.group)
