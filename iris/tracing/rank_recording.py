"""What one rank has recorded: its events, what lies at their addresses, and its clock. Saved to a file and loaded."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from iris.commands.shared_folder import whole
from iris.tracing.clock import Comparison
from iris.tracing.host_clocks import HostClock
from iris.world.rail import Transfer


@dataclass(frozen=True)
class Space:
    """Memory that some ranks share: ``size`` bytes, at the address ``base`` on this rank.

    ``ranks``: their global ranks. ``name`` is the same on all of them, and no other memory has it.
    """

    name: str
    base: int
    size: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Recording:
    """What one rank has recorded.

    Attributes
    ----------
    rank : int
        The global rank.
    ranks : tuple of int
        The global ranks of the context's ranks, by rank in the context.
    device : str
        The device, as torch names it.
    events : numpy.ndarray
        int64 ``[events, WORDS]``, rows as in `iris.language.tracing`.
    lost : int
        How many events there was no room for.
    spaces : tuple of Space
        The shared memory of the process.
    places : dict
        For each address of an event in one of the spaces: the tensor that lies there, and which part of it, in words.
    before, after : Comparison
        This rank's clock against that of the first rank of its host, when recording began and when it ended.
    host : HostClock
        The clock of this rank's host, against those of other hosts.
    transfers : numpy.ndarray
        int64 ``[transfers, 3]``, rows as in `iris.tracing.rail_times`.
    described : tuple of Transfer
        What was transferred. The third number of a row is an index into it.
    """

    rank: int
    ranks: tuple[int, ...]
    device: str
    events: np.ndarray
    lost: int
    spaces: tuple[Space, ...]
    places: dict[int, tuple[str, str]]
    before: Comparison
    after: Comparison
    host: HostClock
    transfers: np.ndarray = field(default_factory=lambda: np.empty((0, 3), dtype=np.int64))
    described: tuple[Transfer, ...] = ()

    def save(self, path: Path) -> None:
        """Write the file at once as a whole: who finds it there can load it."""
        header = asdict(self) | {"events": None, "transfers": None}
        with whole(path) as unfinished, open(unfinished, "wb") as file:
            np.savez(file, header=np.array(json.dumps(header)), events=self.events, transfers=self.transfers)

    @staticmethod
    def load(path: Path) -> "Recording":
        with np.load(path) as file:
            header = json.loads(str(file["header"]))
            header |= {"events": file["events"], "transfers": file["transfers"]}
        host = header["host"]
        compared = host["compared"] and tuple(Comparison(**each) for each in host["compared"])
        header |= {
            "ranks": tuple(header["ranks"]),
            "spaces": tuple(Space(**space | {"ranks": tuple(space["ranks"])}) for space in header["spaces"]),
            "places": {int(address): tuple(place) for address, place in header["places"].items()},
            "before": Comparison(**header["before"]),
            "after": Comparison(**header["after"]),
            "host": HostClock(host["key"], host["name"], compared),
            "described": tuple(
                Transfer(kind, call, rail, *map(tuple, ranks_and_bytes))
                for kind, call, rail, *ranks_and_bytes in header["described"]
            ),
        }
        return Recording(**header)
