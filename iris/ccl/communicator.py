"""What the collectives of one group share: its memory, who its members are, and launches that are ready."""

import functools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch

from iris import simulator
from iris.ccl.kernel_arguments import QueueMemory
from iris.ccl.queue import COUNTS, EXITS, HEAD, MAX_RANKS, MOST_REGIONS, SLOTS, TAIL, WORDS, region_bytes, slots_bytes
from iris.ccl.select import ELSEWHERE, digest, load_table
from iris.cuda_graphs.capture import GraphLine, Line
from iris.cuda_graphs.kept import keep
from iris.errors import InvalidGroupError, InvalidTableError, TooManyStreamsError
from iris.heap.mapping import Mapping
from iris.heap.symmetric import SymmetricHeap
from iris.language.target import architecture, largest_cluster
from iris.machine import figures
from iris.machine.tables import own_folder
from iris.runtime.abort import CALLED, SIZES
from iris.runtime.launch import LAUNCH_CACHE_SIZE
from iris.runtime.workspace import Channel, Workspace

# Programs of a launch in the simulator; elsewhere it depends on the GPU.
SIMULATED_PROGRAMS = 8

# Programs of a message between two ranks at most, and streams on which a rank may send to another.
P2P_PROGRAMS = 2 if simulator.ACTIVE else 32
P2P_STREAMS = 2
# One more for graphs.
P2P_SETS = P2P_STREAMS + 1

# Bytes of all slots of a channel, and of one for messages, which every group has.
STAGING_BYTES = (4 << 20) if simulator.ACTIVE else (32 << 20)
P2P_STAGING_BYTES = 4 << 20
# Bytes of a slot at most, which is what 512 threads move in two instructions each.
LARGEST_SLOT = 16384
# Bytes that a program reads at once, from all ranks together, where programs are few: between two ranks it then takes
# blocks twice as large to keep the link busy.
UNDER_WAY = 65536

Launch = Callable[..., None]
"""Called with a stream's handle, input, output and what else the kernel takes."""


class Queues(NamedTuple):
    """``counts``: int32, ``words``: int64, ``slots``: uint8; see `iris.ccl.queue`."""

    context_tensor: torch.Tensor
    counts: torch.Tensor
    words: torch.Tensor
    slots: torch.Tensor
    slot_bytes: int

    def memory(self, dtype: torch.dtype, comm: "Communicator | None" = None) -> QueueMemory:
        """As kernels take it, with slots of elements of this type. ``comm``: whose regions they access, if any."""
        memory = QueueMemory(self.context_tensor, self.counts, self.words, self.slots.view(dtype))
        return memory if comm is None else memory._replace(heap_table=comm.heap_table, regions=comm.regions)


class Communicator:
    """A group and its workspace. Made collectively, at the group's first use.

    Attributes
    ----------
    rank, size : int
        This rank in the group, and the number of members.
    abort_flag, state
        Whether the group is broken: its flag, and the words of which the first is 0 if it is not.
    refuses : bool
        Whether this rank takes part in a call that it has refused as its root.
    rooted, called, sizes : int
        How many rooted collectives this rank has called; which word of ``state`` says so, and where the sizes of the
        last ones begin: see `iris.ccl.refusal`.
    heap_table : torch.Tensor
        int64 ``[MOST_REGIONS, size + 1]``, a row for each region, which is memory that all members reach: where it
        begins at each member, in this rank's addresses; its bytes. The first is the symmetric heap.
    regions : int
        How many there are.
    num_sms, largest_cluster : int
        The smallest numbers among the members' GPUs: of multiprocessors, and of programs that a cluster may have.
    p2p_programs : int
        Programs of a message between two ranks.
    alike : bool
        Whether all members' GPUs are of one kind. Else what depends on a GPU's speed must not be chosen by that: each
        rank would come to another choice.
    table : Table
        The measurements by which an algorithm is chosen for a size.
    figures : Figures
        What was measured of the members' GPUs. Of no use where they are not alike.
    launches : dict
        Launches that were prepared, by what makes one differ from another.
    configs : list
        The configurations that these keys name by their addresses.
    tables : dict
        Counts and displacements (`iris.ccl.counts`) by line.
    """

    def __init__(self, workspace: Workspace, heap: SymmetricHeap, num_sms: int) -> None:
        group = workspace.group
        if group.size > MAX_RANKS:
            raise InvalidGroupError(f"A group of {group.size} ranks: the collectives are for {MAX_RANKS} at most.")
        self.workspace, self.heap = workspace, heap
        self.state, self.abort_flag = workspace.abort_flag.state, workspace.abort_flag
        self.refuses = False
        self.rooted = 0
        self.called, self.sizes = (self.abort_flag.place(word, group.rank) for word in (CALLED, SIZES))
        self.rank, self.size, self.ranks = group.rank, group.size, group.ranks
        self.device = workspace.device
        bases = dict(zip(heap.group.ranks, heap.bases, strict=True))
        table = [*(bases[rank] for rank in group.ranks), heap.mapped_size]
        rows = [table] + [[0] * len(table)] * (MOST_REGIONS - 1)
        self.heap_table = keep(lambda: torch.tensor(rows, dtype=torch.int64, device=self.device), self.device)
        self.regions = 1

        def introduce() -> tuple[str, str, int, int, int | str]:
            kind = gpu_name(self.device)
            self.table, self.figures = load_table(kind, self.size), figures.find(kind).figures
            return kind, digest(self.table, asdict(self.figures)), num_sms, largest_cluster(), architecture()

        introductions = group.agree(introduce, "begin its first collective of a group")
        kinds, tables, numbers, clusters, architectures = zip(*introductions, strict=True)
        if len(set(architectures)) > 1:
            # Which kernel carries a call is each rank's own choice, by its GPU.
            theirs = ", ".join(f"rank {rank} has {each}" for rank, each in zip(group.ranks, architectures, strict=True))
            raise InvalidGroupError(f"The GPUs of a group must have one architecture: {theirs}. Use those of one kind.")
        # Launches are of as many programs on all ranks.
        self.num_sms, self.largest_cluster = min(numbers), min(clusters)
        self.alike = len(set(kinds)) == 1
        if not self.alike:
            # Nothing was measured among GPUs of several kinds.
            self.table = dict(ELSEWHERE)
        elif len(set(tables)) > 1:
            raise InvalidTableError(
                f"The ranks choose by different tables. Give all of them the same files in {own_folder()}, or none."
            )
        self.launches: dict[Any, Launch] = {}
        self._streams_to: dict[tuple[int, bool], list[int | None]] = {}
        self.p2p_programs = P2P_PROGRAMS if simulator.ACTIVE else message_programs(self.size, self.num_sms)
        self.p2p_slot_bytes = self._slot_bytes(P2P_STAGING_BYTES, self.p2p_programs, LARGEST_SLOT)
        self._p2p_channel = self._set_aside() if self.size > 1 else None
        self.configs: list[object] = []
        self.tables: dict[Line, Any] = {}

    def add_region(self, mapping: Mapping) -> None:
        """Let tensors in this memory of the members, in their order, need no copy, as those on the symmetric heap.

        Collective, between the same calls on all ranks; blocks the host. The caller keeps the mapping for as long as
        any call may run. Launches in graphs that exist know nothing of it.
        """
        assert self.regions < MOST_REGIONS
        row = [*mapping.bases, mapping.size]
        # What runs now reads other rows.
        keep(lambda: self.heap_table[self.regions].copy_(torch.tensor(row)), self.device)
        self.regions += 1
        self.forget()

    def release_graphs(self) -> None:
        """Forget all that was prepared for graphs; see `iris.runtime.workspace.Workspace.release_captures`."""
        self.workspace.release_captures()
        self.launches = {key: launch for key, launch in self.launches.items() if not isinstance(key[-1], GraphLine)}
        self.tables = {line: table for line, table in self.tables.items() if not isinstance(line, GraphLine)}

    def forget(self) -> None:
        """Prepare every launch anew, by the `table` as it is now."""
        self.launches, self.configs = {}, []

    def remember(self, key: Any, config: object, launch: Launch) -> None:
        """Keep a launch for later calls. A full cache is emptied, as in a program whose shapes always change."""
        if len(self.launches) == LAUNCH_CACHE_SIZE:
            self.forget()
        self.launches[key] = launch
        # The configuration is kept, since the key has but its address.
        self.configs.append(config)

    def programs(self, wanted: int | None, block_bytes: int = 0, few_sms: bool = False) -> int:
        """How many programs a kernel with queues may have: at most ``wanted`` (None: as many as possible).

        They are so few that each has slots for blocks of ``block_bytes``, if there can be such slots.

        They are fewer than the multiprocessors, and at least one fits on each of these. Say that launches of two
        streams are in flight, and one rank has all programs of the one resident, and another rank all of the other.
        Then each still has room for the first programs of the other launch. These meet, finish, and make room for the
        next. A launch that begins early leaves the same multiprocessors free, on which the one before it takes at most
        5/16 (`iris.ccl.kernel_launch`).

        Slots are divided by the next power of two. So where programs are slightly more than one, that one is taken.
        """
        limit = SIMULATED_PROGRAMS if simulator.ACTIVE else power_of_two(self.num_sms) // 2
        programs = max(1, min(wanted or limit, limit))
        below = power_of_two(programs) // 2
        programs = below if programs < below + below // 4 else programs
        while programs > 1 and self.slot_bytes(programs, few_sms) < min(block_bytes, LARGEST_SLOT):
            programs = power_of_two(programs) // 2
        return programs

    def slot_bytes(self, programs: int, few_sms: bool) -> int:
        """Bytes of a slot where so many programs share the staging memory; a power of two."""
        largest = max(LARGEST_SLOT, UNDER_WAY // power_of_two(self.size)) if few_sms else LARGEST_SLOT
        return self._slot_bytes(STAGING_BYTES, programs, largest)

    def _slot_bytes(self, staging: int, programs: int, largest: int) -> int:
        share = staging // (power_of_two(programs) * SLOTS * self.size)
        return min(largest, 1 << (share.bit_length() - 1))

    def point_to_point(self, peer: int, sends: bool, line: Line) -> Queues:
        """Queues of `p2p_programs` programs, for messages to ``peer`` alone, or from it.

        The other ranks know nothing of these calls, so the memory is set aside when the group is first used. The n-th
        stream on which this rank sends to ``peer`` meets the n-th on which ``peer`` receives from it. Messages up and
        down the ranks have queues of their own, since a rank may send on one stream while it receives on another.
        """
        up = (self.rank < peer) == sends
        if isinstance(line, GraphLine):
            return self._p2p_queues(P2P_STREAMS, up)
        streams = self._streams_to.setdefault((peer, sends), [])
        if line not in streams:
            if len(streams) == P2P_STREAMS:
                raise TooManyStreamsError(
                    f"Messages between ranks {self.ranks[self.rank]} and {self.ranks[peer]} have been on {P2P_STREAMS} "
                    "streams in this direction, which is as many as there is staging for. Send and receive on these."
                )
            streams.append(line)
        return self._p2p_queues(streams.index(line), up)

    def _set_aside(self) -> Channel:
        """For messages: counts, words and slots of each stream; those of graphs come last, of which one replay may run
        at a time. Counts and words are those of messages up, then down. Slots serve both: up, the senders are the lower
        ranks, and down, the higher."""
        size = P2P_SETS * (
            2 * region_bytes(self.p2p_programs, self.size, 0)
            + slots_bytes(self.p2p_programs, self.size, self.p2p_slot_bytes)
        )
        counts = slice(0, P2P_SETS * 2 * self.p2p_programs * COUNTS.value * 4)
        describe = functools.partial(_describe_counts, self.rank, self.size)
        return self.workspace.channel(
            f"queues of {self.p2p_programs} programs for messages", None, size, counts, describe
        )

    def _p2p_queues(self, n: int, up: bool) -> Queues:
        counts, words = self.p2p_programs * COUNTS.value * 4, self.p2p_programs * WORDS.value * 8
        slots = slots_bytes(self.p2p_programs, self.size, self.p2p_slot_bytes)
        channel = self._p2p_channel
        assert channel is not None
        which, memory = 2 * n + (not up), channel.memory
        first_word = 2 * P2P_SETS * counts
        first_slot = first_word + 2 * P2P_SETS * words
        return Queues(
            channel.context_tensor,
            memory[which * counts :][:counts].view(torch.int32),
            memory[first_word + which * words :][:words].view(torch.int64),
            memory[first_slot + n * slots :][:slots],
            self.p2p_slot_bytes,
        )

    def queues(self, line: Line, programs: int, few_sms: bool) -> Queues:
        """Queues for ``programs`` programs of collectives."""
        rounded, slot_bytes = power_of_two(programs), self.slot_bytes(programs, few_sms)
        name = f"queues of {rounded} programs with slots of {slot_bytes} bytes for collectives"
        slots = slots_bytes(rounded, self.size, slot_bytes)
        return self.program_memory(name, line, rounded, slots, slot_bytes)

    def program_memory(self, name: str, line: Line, programs: int, nbytes: int, slot_bytes: int = 0) -> Queues:
        """What ``programs`` programs tell each other, and ``nbytes`` of slots, of ``slot_bytes`` each if in queues.

        ``name``: of this memory in `iris.runtime.workspace`.
        """
        words = power_of_two(programs) * COUNTS.value * 4
        slots = region_bytes(power_of_two(programs), self.size, 0)
        describe = functools.partial(_describe_counts, self.rank, self.size)
        channel = self.workspace.channel(name, line, slots + nbytes, slice(0, words), describe)
        memory = channel.memory
        return Queues(
            channel.context_tensor,
            memory[:words].view(torch.int32),
            memory[words:slots].view(torch.int64),
            # One rank has no peer that could use any.
            memory[slots:] if nbytes else memory,
            slot_bytes,
        )


def _describe_counts(rank: int, size: int, counts: np.ndarray) -> str:
    """What a program of a rank has put into the queue to each rank, and taken out, at most."""
    largest = counts.reshape(-1, COUNTS.value // MAX_RANKS, MAX_RANKS)[:, :, :size].max(axis=0)
    sent, got, calls = (largest[row.value // MAX_RANKS].tolist() for row in (TAIL, HEAD, EXITS))
    return f"blocks sent to each rank {sent}, got from each {got}; calls that access tensors in place {calls[rank]}"


def gpu_name(device: torch.device) -> str:
    """The name of the GPU, by which tables of measurements have it, or "simulator"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "simulator"


def message_programs(size: int, num_sms: int) -> int:
    """Programs of a message in a group of ``size`` ranks, each of which takes a multiprocessor; a power of two.

    A rank may receive from all others, on a stream each, before it sends to the first: what waits there leaves
    multiprocessors for the programs that send, which wait for their own counterparts alone.
    """
    programs = max(1, min(P2P_PROGRAMS, (num_sms - 1) // max(1, size - 1)))
    return 1 << (programs.bit_length() - 1)


def power_of_two(number: int) -> int:
    """The next power of two, so that calls of similar size share channels."""
    return 1 << (number - 1).bit_length()
