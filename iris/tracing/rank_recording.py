"""What one rank has recorded: its events, where their addresses lie, and its clock; as a file, too."""

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
    """Memory that ``ranks`` of the world reach in each other: ``size`` bytes, on this one at ``base``.

    ``name`` is the same on all of them, and another one for each.
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
        In the world.
    ranks : tuple of int
        Those of the context, in the world, by their numbers in it.
    device : str
    events : numpy.ndarray
        int64 ``[events, WORDS]``, rows as in `iris.language.tracing`.
    lost : int
        Events for which there was no room.
    spaces : tuple of Space
    places : dict
        For each address that is some event's and lies in one of these: what it is of, and which part, in words.
    before, after : Comparison
        Of this rank's clock, with that of the first rank of its host.
    host : HostClock
    transfers : numpy.ndarray
        int64 ``[transfers, 3]``, rows as in `iris.tracing.rail_times`.
    described : tuple of Transfer
        What these rows are of, by their numbers.
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
        """To a file that is there when it is whole."""
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
