"""Which symmetric memory a call of a fused operation uses: that of its stream, of its graphs, or what it is given."""

from typing import Any

import torch

from iris.ccl.protocols import CollectivesContext
from iris.cuda_graphs.capture import GraphLine, Line, Lines, outside_captures
from iris.errors import (
    FirstUseInCaptureError,
    HeapTooLargeError,
    InvalidCollectiveError,
    MismatchedCollectiveError,
    short_repr,
)
from iris.ops.arena import COUNT_BYTES, Arena
from iris.ops.buffers import Buffers, Needs, use_of
from iris.ops.call import title_of
from iris.ops.counts import MOST_RANKS

# By how much the data of an arena grow at least: of numbers of rows that rise one by one, few are too large for it.
GROWTH = 1.5


class Workspaces:
    """Of a context. Ranks ask for the same in the same order on each stream, and so get the same.

    Attributes
    ----------
    revision : int
        Another number when calls may have to find other memory than before.
    """

    def __init__(self, context: CollectivesContext) -> None:
        self._context = context
        self._on_gpu = context.device.type == "cuda"
        self._lines = Lines()
        self.revision = 0
        self._used: dict[tuple[tuple, Line], Buffers] = {}
        self._arenas: dict[Line, Arena] = {}

    def find(self, needs: Needs, stream: int | None) -> Buffers:
        """What a call on the current stream uses. Collective, and blocks the host, if there was no room yet."""
        line: Line = stream
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            line = self._lines.find(stream)
        found = self._used.get((needs.kind, line))
        if found is not None:
            return found
        if isinstance(line, GraphLine):
            self._take_captured(needs, line)
        else:
            self._take(needs, line)
        return self._used[needs.kind, line]

    # What is made in inference mode could not be written outside it.
    @torch.inference_mode(False)
    def make(self, needs: Needs) -> Buffers:
        """For calls of one kind that will be given it. Collective; blocks the host. Not in the capture of a graph."""
        return self._make(needs, needs.count_bytes, needs.data_bytes).take(needs)

    def check(self, name: str, given: Any, kind: tuple | None) -> None:
        """Raise unless a call of this kind can use what it is given; one of the vendor's, of no kind, uses nothing."""
        if not isinstance(given, Buffers):
            raise InvalidCollectiveError(f"workspace={short_repr(given)} is not what {name}_preamble() returned.")
        if given.arena.abort_flag is not self._context._workspace(None).abort_flag:
            raise InvalidCollectiveError(f"The workspace given to {name}() was prepared by another context.")
        given.check((name, "by the vendor's GEMM, which needs none") if kind is None else kind)

    def close(self) -> None:
        """Let go of all but what was given away. The caller guarantees that no kernel uses it, on any rank."""
        self.revision += 1
        for buffers in self._used.values():
            buffers.close()
        self._used.clear()
        self._arenas.clear()

    def _make(self, needs: Needs, count_bytes: int, data_bytes: int) -> Arena:
        """``needs``: of the call that asks for it, by which an error knows it.

        Raises `MismatchedCollectiveError` on all ranks if they ask for other sizes, and `HeapTooLargeError` where there
        is no room.
        """
        context, group = self._context, self._context._world.group
        if context.num_ranks > MOST_RANKS:
            raise InvalidCollectiveError(
                f"Fused operations are for up to {MOST_RANKS} ranks, and there are {context.num_ranks}."
            )
        asked = [count_bytes, data_bytes, use_of(needs.kind)]
        everyones = group.all_gather(asked, "the making of a workspace of fused operations")
        if any(each[:2] != everyones[0][:2] for each in everyones):
            theirs = "; ".join(f"rank {rank} {each[2]}" for rank, each in zip(group.ranks, everyones, strict=True))
            raise MismatchedCollectiveError(
                f"The ranks make calls of fused operations that need unequal memory: {theirs}. Give all ranks matrices "
                "of equal shapes and dtypes, in the same order of calls; IRIS_DEBUG=1 on all ranks compares each call."
            )
        try:
            return Arena(group, context.device, context._workspace(None).abort_flag, count_bytes, data_bytes)
        except HeapTooLargeError as error:
            raise HeapTooLargeError(
                f"{use_of(needs.kind)} needs a workspace, memory like the heap's and beside it. {error} "
                "With FusedConfig(variant='vendor') it needs none."
            ) from error

    @torch.inference_mode(False)
    def _take(self, needs: Needs, stream: int | None) -> None:
        """Of the stream's arena, or of a larger one in its place.

        Its kinds get room there too, so that whoever has called them need not do it again before a capture; if there
        were too many of them, they are forgotten.
        """
        arena, wanted = self._arenas.get(stream), [needs]
        if arena is None:
            self._arenas[stream] = self._make(needs, max(COUNT_BYTES, needs.count_bytes), needs.data_bytes)
        elif not arena.has_room(needs):
            data_bytes = arena.data_bytes
            if needs.data_bytes > data_bytes:
                data_bytes = max(needs.data_bytes, int(GROWTH * data_bytes))
                wanted = [*(buffers.needs for buffers in self._used.values() if buffers.arena is arena), needs]
            self._let_go(stream)
            count_bytes = sum(each.count_bytes for each in wanted)
            self._arenas[stream] = self._make(needs, max(COUNT_BYTES, count_bytes), data_bytes)
        for each in wanted:
            self._used[each.kind, stream] = self._arenas[stream].take(each)

    def _let_go(self, stream: int | None) -> None:
        """Of a stream's arena, which is unmapped. All that uses it is on the current stream, or joined to it.

        Other streams are not waited for: peers may be waiting there for what this rank has not enqueued yet.
        """
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        self._context._world.group.all_gather(None, "a larger workspace of fused operations")
        self.revision += 1
        arena = self._arenas.pop(stream)
        self._used = {key: buffers for key, buffers in self._used.items() if buffers.arena is not arena}
        arena.close()

    @torch.inference_mode(False)
    def _take_captured(self, needs: Needs, line: GraphLine) -> None:
        """Of the arena of a line of graphs, or of a new one beside it, which has room for all that eager calls use.

        Nothing can be compiled in a capture, so there has been an eager call. The arena before is kept, since the
        graphs that use it may be replayed.
        """
        eager = {kind: buffers.needs for (kind, of), buffers in self._used.items() if not isinstance(of, GraphLine)}
        if needs.kind not in eager:
            raise FirstUseInCaptureError(f"{title_of(needs.kind[0])} of this shape")
        if line not in self._arenas or not self._arenas[line].has_room(needs):
            count_bytes = sum(each.count_bytes for each in eager.values())
            with outside_captures(self._context.device):
                self._arenas[line] = self._make(
                    needs, max(COUNT_BYTES, count_bytes), max(each.data_bytes for each in eager.values())
                )
        self._used[needs.kind, line] = self._arenas[line].take(needs)
