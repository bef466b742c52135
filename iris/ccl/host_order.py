"""Rows of all ranks: in the order of ranks, as callers have them, and by host and local rank, as rails move them.

Where the ranks of a host follow each other, the two orders are one, and nothing is copied. Else rows are picked by
numbers that lie on the device: a CUDA graph cannot capture that the host copies them there.
"""

from collections.abc import Sequence

import torch

from iris.cuda_graphs.kept import keep
from iris.world.hosts import Hosts


class HostOrder:
    """Of the ranks of ``hosts``, for tensors on ``device``."""

    def __init__(self, hosts: Hosts, device: torch.device) -> None:
        order = [rank for ranks in hosts.ranks for rank in ranks]
        self._order = None if order == sorted(order) else _kept(order, device)
        # Where the rows of each host are: one after the other, or by their numbers.
        self._places = [_one_after_the_other(ranks) or _kept(ranks, device) for ranks in hosts.ranks]

    def by_host(self, rows: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The rows of all ranks by host and local rank: a copy, or the rows themselves."""
        return rows if self._order is None else rows.index_select(dim, self._order)

    def write(self, rows: torch.Tensor, by_host: torch.Tensor, dim: int = 0) -> None:
        """Write what is by host and local rank into ``rows``, which are in the order of ranks."""
        if self._order is None:
            rows.copy_(by_host)
        else:
            rows.index_copy_(dim, self._order, by_host)

    def of_host(self, rows: torch.Tensor, host: int) -> torch.Tensor:
        """Those of the ranks of one host: a view of ``rows`` if they follow each other, else a copy."""
        place = self._places[host]
        return rows[place] if isinstance(place, slice) else rows.index_select(0, place)

    def view_of_host(self, rows: torch.Tensor, host: int) -> torch.Tensor | None:
        """The same, or None if it is no view."""
        place = self._places[host]
        return rows[place] if isinstance(place, slice) else None

    def write_of_host(self, rows: torch.Tensor, host: int, theirs: torch.Tensor) -> None:
        """Write the rows of one host's ranks."""
        place = self._places[host]
        if isinstance(place, slice):
            rows[place] = theirs
        else:
            rows.index_copy_(0, place, theirs)


def _one_after_the_other(ranks: Sequence[int]) -> slice | None:
    """Where the rows of these ranks are, if they follow each other."""
    place = slice(ranks[0], ranks[-1] + 1)
    return place if len(ranks) == ranks[-1] + 1 - ranks[0] else None


def _kept(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    return keep(lambda: torch.tensor(numbers, device=device), device)
