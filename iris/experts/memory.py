"""The memory of dispatches and combines, and why each word may be written when it is.

Each slot, of `ExpertsConfig.in_flight`, serves one dispatch and its combine at a time. W ranks, K choices, H elements,
M tokens of a rank at most, LOCAL experts on each. Of each kernel P programs on each rank send and P receive; "sender p"
and "receiver p" are the p-th of them. The symmetric part of a slot:

    name      shape          who writes it, on which ranks                   who reads it
    calls     [2 P]          each program of this rank's dispatch its own    the same, and that of the combine
    routed    [W]            each sender of dispatch on s adds 1 on all      every receiver of dispatch
    sent      [W, P]         sender p of dispatch on s, on all               receiver p of dispatch
    weighed   [W, P]         sender p of combine, or dispatch, on s, on all  sender p of combine, on s receiver p
    returned  [W, P]         sender p of combine on d, on the others         receiver p of combine
    tokens    [W]            sender 0 of dispatch on s, on all               receivers of dispatch, all of combine
    tallies   [W, P, LOCAL]  sender p of dispatch on s, on all               every receiver of dispatch
    choices   [W, M, K]      s's dispatch, its own on all                    receivers of dispatch, own ones combine
    weights   [W, M, K]      s's dispatch or combine, its own on all         combine
    rows      [W, M, H]      s's dispatch, where experts are                 receiver p of dispatch
    partials  [W, M, H]      d's combine, on the token's rank                receiver p of combine
    staged    [W, 6, M/32]   d's combine in stages, on the others            combine in stages

Rows of fp8 lie in the first part of ``rows``, and their factors after them.

A call is one launch, or with ``async_op=True`` two: its senders alone, P programs, and after them its receivers. Other
calls may lie in between, but none of this slot: the host gives it to no other dispatch before the receivers of the
combine are enqueued. So "a launch after" a call comes after both halves, and a combine comes after the receivers of its
dispatch, which return what it is given.

``calls`` counts the dispatches of the slot, and the combine of one has its number. So a replayed graph needs nothing of
the host. Each program has a word of its own, to which it adds 1 at the end of its launch of a dispatch. A dispatch has
one launch of its senders and one of its receivers, or one of both; so either kind finds n - 1 in the n-th, whether the
others of the same dispatch have ended or not, and in combine n both find n.

The flags only rise and are never reset; waits are for a value to be *reached*, by a wrapping difference.
Each is set with release at system scope, after its program's stores, and waited for with acquire:

1. ``routed[s]`` is n P when all senders of rank s have sent tokens, tallies, choices and weights of dispatch n: none
   adds for the n-th time before all have for the (n - 1)-th, which was an earlier launch.
2. ``sent[s, p]`` is at n S + i, S being `Extents.STEPS`, when sender p of s has sent the rows of i steps. Who waits for
   it serves the same share of the tokens.
3. ``weighed[s, p]`` is n when sender p of s has sent its weights in combine n.
4. ``returned[d, p]`` is at n S + i when sender p of d has stored the sums of i steps of each rank, and at n S + S - 1
   when it has of all. It is the last that this program does with what came from other ranks.

Why dispatch n + 1 of rank s may write to d what dispatch n wrote: it is a launch after combine n of s, whose receivers
have all waited for the last value of ``returned[d, p]``, each for its p. So all senders of d's combine had read what
they read of other ranks; d's receivers read their own rank's tokens, choices and weights alone, and ``partials``, of
which below. What d's dispatch n reads, its receivers had read when d's combine began, a launch after them. The host
gives a slot to another dispatch only after the combine; without one, `Received.release` enqueues a barrier of all
ranks, which does the same.

Why combine n of s may write weights to d: nothing reads them in dispatch, and d's combine n - 1 is over, by the above.

Why combine n of d may write to ``partials`` of s: d has waited for ``routed[s]`` of dispatch n, which s adds to after
its combine n - 1, where it has read them.

Why a flag of long ago is not taken for one ahead, which by a wrapping difference is one that is 2^31 behind:

* ``routed`` and ``returned`` are raised in every call.
* Sender p raises ``sent`` only in dispatches in which it has tokens, and ``weighed`` only in combines with weights. So
  once in 2^30 / S dispatches of the slot, or sooner, it raises both all the same: in dispatch n to n S + S - 1, when it
  has sent all rows that receivers wait for, and to n - 1, which is less than combine n waits for.
* ``staged`` is raised for every block in each combine in stages. This is not guarded: 2^31 dispatches of the slot would
  have to come between two of these.

Each rank makes the same calls in the same order, so the ranks give slots alike. All calls of one rank follow each
other: on one stream, or on several that wait for each other.
"""

import weakref
from typing import NamedTuple

import torch
from triton import cdiv, next_power_of_2

from iris.cuda_graphs.kept import keep
from iris.errors import InvalidExpertsError, readable
from iris.experts.config import ExpertsConfig
from iris.experts.kernel_arguments import Extents, FewTokens, Layout, LowLatencySlot, Scales, Slot
from iris.experts.low_latency.memory import shapes
from iris.experts.statistics import Statistics
from iris.heap import mapping
from iris.language.context_tensor import context_tensor
from iris.runtime.workspace import Workspace

# Bytes: each part begins at a multiple of these, as tensors on the heap do.
ALIGNMENT = 1024
# Warps of a program. Two of them, one that sends and one that receives, share a multiprocessor, so that one computes
# while the other waits; both together leave the room that `leaving_room` speaks of.
NUM_WARPS = 4
# Tokens of a step of dispatch, which moves their rows together, and of combine, which moves one token's at a time.
STEP, SUMS = 4, 2
# Bytes of each row that a program sends at a time, copies (more, since nothing is computed), and adds up; and how many
# such pieces of rows are under way.
BLOCK_BYTES, COPIED, ADDED_BYTES, AHEAD = 2048, 4096, 16384, 2
# Choices that a program compares with each other, and numbers of rows that it adds up at a time.
PAIRS, TALLIES = 128, 8192
# Of `iris.ops.combine_in_stages`: stages at most, and tokens of a rank that have a flag for each.
STAGES, STAGED_TOKENS = 6, 32

FLAGS = ("calls", "routed", "sent", "weighed", "returned", "staged")


class Part(NamedTuple):
    """A tensor in the symmetric memory, the same place on each rank. ``begin``: in bytes."""

    name: str
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def extents(
    size: int,
    num_experts: int,
    top_k: int,
    max_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    programs: int,
    alone: bool = False,
) -> Extents:
    """Of ``size`` ranks on which so many programs send, and as many receive.

    ``alone``: on a multiprocessor each, so that they may have the warps of two.
    """
    local, larger = num_experts // size, 2 if alone else 1
    choices = next_power_of_2(top_k)
    return Extents(
        W=size,
        E=num_experts,
        LOCAL=local,
        K=top_k,
        M=max_tokens,
        H=hidden,
        EXPERTS=next_power_of_2(num_experts),
        LOCALS=next_power_of_2(local),
        CHOICES=choices,
        RANKS=next_power_of_2(size),
        COUNTED=max(1, PAIRS // choices),
        STEP=STEP,
        STEPS=cdiv(cdiv(max_tokens, programs), min(STEP, SUMS)) + 1,
        PROGRAMS=programs,
        SUMS=SUMS,
        WARPS=larger * NUM_WARPS,
        BLOCK=min(next_power_of_2(hidden), larger * BLOCK_BYTES // dtype.itemsize),
        ADDED=min(next_power_of_2(hidden), larger * ADDED_BYTES // dtype.itemsize),
        AHEAD=AHEAD,
        COPIED=larger * COPIED,
        TALLIES=max(1, min(128, TALLIES // next_power_of_2(local))),
    )


def slot_parts(extents: Extents | FewTokens, dtype: torch.dtype) -> list[Part]:
    """The parts of a slot, one after the other; flags first."""
    if isinstance(extents, FewTokens):
        return in_a_row(shapes(extents, dtype))
    W, M, K, H, programs = extents.W, extents.M, extents.K, extents.H, extents.PROGRAMS
    of_slot = {
        "calls": (2 * programs,),
        "routed": (W,),
        "sent": (W, programs),
        "weighed": (W, programs),
        "returned": (W, programs),
        "tokens": (W,),
        "tallies": (W, programs, extents.LOCAL),
        "choices": (W, M, K),
        "weights": (W, M, K),
        "rows": (W, M, H),
        "partials": (W, M, H),
        "staged": (W, STAGES, -(-M // STAGED_TOKENS)),
    }
    dtypes = {"weights": torch.float32, "rows": dtype, "partials": dtype}
    return in_a_row({name: (shape, dtypes.get(name, torch.int32)) for name, shape in of_slot.items()})


def in_a_row(parts: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> list[Part]:
    """Each after the one before."""
    found: list[Part] = []
    begin = 0
    for name, (shape, dtype) in parts.items():
        found.append(Part(name, begin, shape, dtype))
        begin += round_up(found[-1].nbytes)
    return found


def round_up(nbytes: int) -> int:
    return cdiv(nbytes, ALIGNMENT) * ALIGNMENT


def layout_rows(extents: Extents | FewTokens, layout: str, alignment: int) -> int:
    """Rows that a layout has room for: as many as may come, if all tokens choose the experts of this rank.

    A token has one row for each of its different experts.
    """
    tokens = extents.W * extents.M
    if layout == "expanded":
        return extents.LOCAL * tokens
    return tokens * min(extents.K, extents.LOCAL) + extents.LOCAL * (alignment - 1)


class Memory:
    """Made collectively by the members of a group with the same sizes; blocks the host.

    Attributes
    ----------
    mapping : Mapping
        The symmetric part: one slot after the other.
    abort_flag : AbortFlag
        Of the group.
    slots : list of Slot, or of LowLatencySlot
        As kernels take them.
    staged : list of torch.Tensor
        Of each slot, for `iris.ops.combine_in_stages` alone.
    layouts : list of dict
        Of each slot, by the layout's name, what kernels take, a `Layout`.
    statistics : Statistics or None
        Of all slots, if they are asked for; of this rank alone.
    """

    # For messages about waits: see `iris.heap.mapping.Mapping`. No more ranks are waited for than a record has bits.
    flags_apart = True

    def __init__(
        self, workspace: Workspace, extents: Extents | FewTokens, dtype: torch.dtype, config: ExpertsConfig
    ) -> None:
        group, device = workspace.group, workspace.device
        self.abort_flag = workspace.abort_flag
        self._parts = slot_parts(extents, dtype)
        last = self._parts[-1]
        self._slot_bytes = last.begin + round_up(last.nbytes)
        rows = {name: layout_rows(extents, name, config.alignment) for name in config.layouts}
        places = extents.W * extents.M * extents.K
        of_layouts = sum(each * extents.H * dtype.itemsize + 4 * places for each in rows.values())
        needed = config.in_flight * (self._slot_bytes + of_layouts)
        group.agree(lambda: check_room(needed, device, config), "set memory aside for experts")
        self.mapping = mapping.create(group, config.in_flight * self._slot_bytes, device)
        self.mapping.owner = weakref.ref(self)
        few = isinstance(extents, FewTokens)
        for number in range(config.in_flight):
            for part in self._parts:
                if few or part.name in FLAGS:
                    self._tensor(number, part).zero_()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        context = context_tensor(group.rank, self.mapping.bases, self.mapping.size, self.abort_flag.record, device)
        tensors = [[self._tensor(number, part) for part in self._parts] for number in range(config.in_flight)]
        self.slots = [LowLatencySlot(context, *each) if few else Slot(context, *each[:-1]) for each in tensors]
        self.staged = [] if few else [each[-1] for each in tensors]
        try:
            # On all ranks, or on none: a device may have less room than another.
            group.agree(lambda: self._allocate(rows, extents, dtype, config, device), "set memory aside for experts")
        except BaseException:
            self.mapping.close()
            raise

    def _allocate(
        self,
        rows: dict[str, int],
        extents: Extents | FewTokens,
        dtype: torch.dtype,
        config: ExpertsConfig,
        device: torch.device,
    ) -> None:
        """What this rank has for itself: nobody else stores there. ``rows``: of each layout."""
        self.layouts = keep(
            lambda: [
                {
                    name: Layout(
                        rows=torch.empty(room, extents.H, dtype=dtype, device=device),
                        counts=torch.zeros(extents.LOCAL, dtype=torch.int32, device=device),
                        offsets=torch.zeros(extents.LOCAL + 1, dtype=torch.int32, device=device),
                        places=torch.empty(extents.W * extents.M * extents.K, dtype=torch.int32, device=device),
                    )
                    for name, room in rows.items()
                }
                for _ in range(config.in_flight)
            ],
            device,
        )
        self.statistics: Statistics | None = None
        if config.statistics:
            shapes = (extents.LOCAL, extents.W, extents.W)
            self.statistics = keep(
                lambda: Statistics(*[torch.zeros(shape, dtype=torch.int64, device=device) for shape in shapes]), device
            )

    def narrow(
        self, number: int, layout: str, dtype: torch.dtype, scales: int
    ) -> tuple[Slot | LowLatencySlot, Layout, Scales]:
        """The same memory for rows of fp8 with so many factors each, which lie after all rows."""
        slot, tensors = self.slots[number], self.layouts[number][layout]
        rows, placed = split_rows(tensors.rows, dtype, scales)
        if isinstance(slot, LowLatencySlot):
            # Its kernels know where what they have sent is.
            return slot, tensors._replace(rows=rows), Scales(None, None, placed)
        sent, sent_scales = split_rows(slot.rows, dtype, scales)
        return slot._replace(rows=sent), tensors._replace(rows=rows), Scales(None, sent_scales, placed)

    def name_at(self, offset: int) -> tuple[str, str]:
        """What uses the memory there, and which part of it that is, in words."""
        number, inside = divmod(offset, self._slot_bytes)
        part = next(each for each in reversed(self._parts) if each.begin <= inside)
        return f"memory of ctx.experts, slot {number}", f"byte {inside - part.begin} of {part.name}"

    def describe_offset(self, offset: int) -> str:
        """The same in one text."""
        return ": ".join(self.name_at(offset))

    def progress(self) -> list[str]:
        """How many dispatches each slot has had on this rank. Local; any thread; waits for no kernel."""
        counted = []
        for number in range(len(self.slots)):
            calls = self.mapping.snapshot(number * self._slot_bytes, self._parts[0].nbytes).view("int32")
            if calls.any():
                counted.append(f"slot {number} of ctx.experts: {calls.max()} dispatches over")
        return counted

    def close(self) -> None:
        """Let go of it. The caller guarantees that no kernel uses the memory any more, on any rank."""
        self.mapping.close()
        self.slots, self.staged, self.layouts = [], [], []

    def _tensor(self, number: int, part: Part) -> torch.Tensor:
        begin = number * self._slot_bytes + part.begin
        return self.mapping.buffer[begin : begin + part.nbytes].view(part.dtype).view(part.shape)


def check_room(needed: int, device: torch.device, config: ExpertsConfig) -> None:
    """That the device has so many bytes at all."""
    total = mapping.total_memory(device)
    if needed > total:
        raise InvalidExpertsError(
            f"ctx.experts() would set {readable(needed)} aside on each rank, and {device} has {readable(total)}. It is "
            f"for {config.in_flight} in flight, with rows in {' and '.join(map(repr, config.layouts))}. Ask for fewer "
            "max_tokens, or in ExpertsConfig for less in_flight, or for one of the layouts alone."
        )


def split_rows(rows: torch.Tensor, dtype: torch.dtype, scales: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of rows of a wider type, as rows of ``dtype`` and float32 ``[rows, scales]`` after them."""
    memory, count = rows.view(torch.uint8).flatten(), rows.numel() // rows.shape[-1]
    end = rows.numel()
    narrow = memory[:end].view(dtype).view(*rows.shape[:-1], rows.shape[-1])
    return narrow, memory[end:][: 4 * count * scales].view(torch.float32).view(count, scales)
