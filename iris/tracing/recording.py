"""``ctx.tracing``: switches recording on, reads what this rank's kernels have recorded, and exports the trace."""

import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path

import numpy as np
import torch

from iris.arg_parser import count
from iris.commands.shared_folder import own_folder
from iris.cuda_graphs.kept import keep
from iris.errors import InvalidArgumentError, InvalidCountError, InvalidSettingError, NotTracingError, short_repr
from iris.failures.device_record import DeviceRecord
from iris.heap import SymmetricHeap
from iris.heap.mapping import mappings, snapshot
from iris.language.trace_buffer import ADDRESS, ASKED, HEADER, LAST_LOOKS, ROOM, WORDS
from iris.language.tracing import TRACES_ALL
from iris.runtime.workspace import Workspace
from iris.tracing import chrome, host_clocks
from iris.tracing.between_hosts import gather_files
from iris.tracing.clock import Clock, Comparison
from iris.tracing.host_clocks import HostClock
from iris.tracing.rail_times import RailTimes, times_on
from iris.tracing.rank_recording import Recording, Space
from iris.tracing.timeline import Timeline, assemble
from iris.world import World
from iris.world.placement import find_host
from iris.world.rail import Timer, Transfer, timed_by

FOLDER_VARIABLE, EVENTS_VARIABLE = "IRIS_TRACE_FOLDER", "IRIS_TRACE_EVENTS"
MAX_EVENTS = 1_000_000

# Numbers the contexts of this process, for the names of files. All ranks make contexts in one order.
_numbers = itertools.count()


class Tracing:
    """Events of kernels whose device context was initialised with ``tracing=True``. See the documentation, "Tracing".

    Parameters
    ----------
    world
        All ranks.
    workspace
        The workspace of this host's ranks, in which their clocks are compared.
    record
        In its words kernels find the address of the buffer.
    drain
        Waits on the host until this rank's kernels are over.
    time_rails
        Called with a timer, lets it note the transfers of all rails of the context.
    """

    def __init__(
        self,
        world: World,
        workspace: Workspace,
        record: DeviceRecord,
        drain: Callable[[], None],
        time_rails: Callable[[Timer], None],
    ) -> None:
        self._group, self._device, self._record = world.group, world.device, record
        self._hosts, self._rail, self._time_rails = world.hosts, world.rail, time_rails
        self._workspace, self._drain = workspace, drain
        self._rail_times: RailTimes | None = None
        self._hosts_before: Comparison | None = None
        self._rank = self._group.ranks[self._group.rank]
        self._clock: Clock | None = None
        self._buffer: torch.Tensor | None = None
        self._before: Comparison | None = None
        self._path: Path | None = None
        self._save: Finalize | None = None

    def enable_if_wanted(self) -> None:
        """With ``IRIS_TRACE=1``: `enable`. Collective.

        If ``python -m iris trace`` has set a folder, the events are saved there by `save`, or else when the program
        ends.
        """
        if not TRACES_ALL.value:
            return
        events = os.environ.get(EVENTS_VARIABLE, str(MAX_EVENTS))
        if not events.isdecimal() or int(events) == 0:
            raise InvalidSettingError(EVENTS_VARIABLE, events, "a number of events, 1 or more")
        self.enable(int(events))
        if folder := os.environ.get(FOLDER_VARIABLE):
            path = self._path = Path(folder) / f"rank{self._rank}.{next(_numbers)}.npz"
            self._save = Finalize(None, lambda: self.recording(alone=True).save(path), exitpriority=10)

    def save(self, alone: bool = False) -> None:
        """Save the events, if ``python -m iris trace`` has set a folder, while the memory is there. As `recording`."""
        if self._path is None or self._save is None or not self._save.still_active():
            return
        self._save.cancel()
        self.recording(alone).save(self._path)

    def enable(self, max_events: int = MAX_EVENTS) -> None:
        """Record from here on, up to ``max_events`` on each rank, 112 bytes each. Forgets what was recorded before.

        Collective; blocks the host. The clocks of the ranks are compared, here and in `export`. Raises
        `InvalidCountError` for less than one event.
        """
        buffer: torch.Tensor | None = None

        def make_room() -> None:
            nonlocal buffer
            if count(max_events) is None:
                raise InvalidCountError("max_events", max_events, "events")
            self._drain()
            size = HEADER.value + count(max_events) * WORDS.value
            buffer = keep(lambda: torch.zeros(size, dtype=torch.int64, device=self._device), self._device)

        self._group.agree(make_room, "make room for its events")
        assert buffer is not None
        buffer[ROOM.value] = max_events
        self._record.trace_into(buffer)
        self._buffer = buffer
        self._drain()
        if self._clock is None:
            self._clock = Clock(self._workspace)
        self._before = self._clock.compare()
        if self._rail is not None:
            self._hosts_before = self._compare_hosts()
            if self._rail_times is None:
                self._rail_times = times_on(self._device)
            self._rail_times.forget(idle=True)
            self._time_rails(self._rail_times)

    def reset(self) -> None:
        """Forget what this rank has recorded so far. Enqueued on the current stream; other streams must wait for it."""
        buffer = self._check_enabled()
        buffer[ASKED.value] = 0
        buffer[LAST_LOOKS.value :] = 0
        if self._rail_times is not None:
            self._rail_times.forget()

    def export(self, path: str | Path = "trace.json", merge: bool = False) -> Path:
        """Write the events in Chrome's JSON, which https://ui.perfetto.dev opens; returns the file of this rank.

        Collective; blocks the host until all files are there; waits for the kernels. Each rank writes its own events,
        rank 3 to ``trace.rank3.json`` for ``trace.json``; with ``merge`` there is one file, ``path``, with those of all
        ranks and with flows from signals to the waits that they ended. Times are on the same clock in all of them, in
        microseconds from the first event of any rank. Recording goes on.

        Raises
        ------
        NotTracingError
            `enable` was not called.
        OSError, PeerFailedError
            A rank could not write its file: on that rank, and on the others.
        """

        def check_path() -> None:
            if not isinstance(path, str | os.PathLike):
                raise InvalidArgumentError(f"path={short_repr(path)} is not possible: it is the name of a file.")

        self._group.agree(check_path, "find where to write its events")
        path = Path(path)
        timeline = self._assemble(wanted=self._group.rank == 0 or not merge)
        if not merge and self._group.size > 1:
            path = path.with_name(f"{path.stem}.rank{self._rank}{path.suffix}")

        def write() -> None:
            if timeline is not None:
                chrome.write(timeline if merge else timeline.of_rank(self._rank), path)

        self._group.agree(write, "write its events")
        return path

    def timeline(self) -> Timeline:
        """The events of all ranks, as `export` writes them. Collective, on every rank; blocks the host."""
        timeline = self._assemble(wanted=True)
        assert timeline is not None
        return timeline

    def _assemble(self, wanted: bool) -> Timeline | None:
        """The timeline of all ranks, on ranks where it is ``wanted``. Collective.

        Ranks of a host exchange their recordings through files, which may be too large for the process group's store.
        """
        recording = self.recording()
        timeline: Timeline | None = None
        folder: str | None = None

        def make_folder() -> str | None:
            nonlocal folder
            if self._hosts.local_rank == 0:
                folder = str(own_folder("iris-trace"))
            return folder

        def write(gathered: dict[int, bytes]) -> None:
            for rank, content in gathered.items():
                (shared / f"{rank}.npz").write_bytes(content)

        def read() -> None:
            nonlocal timeline
            if wanted:
                timeline = assemble([Recording.load(each) for each in shared.glob("*.npz")])

        try:
            folders = self._group.agree(make_folder, "make a folder for the events of all ranks")
            folder = folders[self._hosts.local_ranks[0]]
            assert folder is not None  # which the first rank of the host has made
            shared = Path(folder)
            own = shared / f"{self._rank}.npz"
            self._group.agree(lambda: recording.save(own), "save its events")
            if self._rail is not None:
                gathered = self._gather_from_hosts(own)
                self._group.agree(lambda: write(gathered), "save the events of other hosts")
            self._group.agree(read, "read the events of all ranks")
        finally:
            # All ranks remove it, as any of them may have died. Each comes here when all have read, or none will.
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        return timeline

    def recording(self, alone: bool = False) -> Recording:
        """What this rank has recorded. Collective unless ``alone``.

        With ``alone``, for after an error, it waits for no kernel, since one may hang: it is what there is by now. The
        comparisons of clocks are then those of `enable`.
        """
        self._check_enabled()
        if not alone:
            self._drain()
        before, clock = self._before, self._clock
        assert before is not None and clock is not None  # `enable` has set both
        after = before if alone else clock.compare()
        host, transfers, more_lost = HostClock(*find_host()), np.empty((0, 3), dtype=np.int64), 0
        described: tuple[Transfer, ...] = ()
        if self._hosts_before is not None and self._rail_times is not None:
            hosts_after = self._hosts_before if alone else self._compare_hosts()
            host = replace(host, compared=(self._hosts_before, hosts_after))
            transfers, described, more_lost = self._rail_times.recorded()
        asked, room = self._copy(HEADER.value)[: ROOM.value + 1].tolist()
        events = self._copy(HEADER.value + min(asked, room) * WORDS.value)[HEADER.value :].reshape(-1, WORDS.value)
        spaces, places = [], {}
        addresses = np.unique(events[:, ADDRESS.value])
        for mapping in mappings():
            owner, base = mapping.owner(), mapping.bases[mapping.rank]
            # Users' kernels number the ranks of all hosts, though they can access only those of their own.
            ranks = owner.group.ranks if isinstance(owner, SymmetricHeap) else mapping.ranks
            spaces.append(Space(mapping.name, base, mapping.size, ranks))
            if owner is not None:
                for address in addresses[(addresses >= base) & (addresses < base + mapping.size)].tolist():
                    places[address] = owner.name_at(address - base)
        return Recording(
            self._rank,
            self._group.ranks,
            str(self._device),
            events,
            max(0, asked - room) + more_lost,
            tuple(spaces),
            places,
            before,
            after,
            host,
            transfers,
            described,
        )

    def _gather_from_hosts(self, own: Path) -> dict[int, bytes]:
        """The recordings of ranks of other hosts, by global rank. Collective over all ranks."""
        assert self._rail is not None
        # No timer: the trace shows the program's transfers, and not its own.
        with timed_by(self._group, None):
            files = gather_files(self._group, self._hosts, self._rail, own, self._device)
        return {self._group.ranks[rank]: content for rank, content in files.items()}

    def _compare_hosts(self) -> Comparison:
        assert self._rail is not None
        return host_clocks.compare(self._group, self._hosts, self._rail, self._device)

    def _copy(self, words: int) -> np.ndarray:
        """A copy of the buffer's first words, made without waiting for kernels."""
        return snapshot(self._check_enabled()[:words].view(torch.uint8)).view(np.int64)

    def _check_enabled(self) -> torch.Tensor:
        """The buffer in which kernels write. Raises `NotTracingError` if there is none."""
        if self._buffer is None:
            raise NotTracingError()
        return self._buffer
