"""The steps of gather, scatter and reduce over hosts: within each host, and along the rail of the root.

Large calls go in chunks of each rank's part, so that the rail moves one while the ranks of each host work on another,
and a root needs room for two of them, however large the whole is (`iris.ccl.chunks`).
"""

from collections.abc import Callable
from typing import Any

import torch

from iris.ccl.chunks import chunks_of_rooted, one_ahead, two_buffers
from iris.ccl.host_sums import add_up
from iris.ccl.reduction import reduction
from iris.ccl.span import Partials, Root, Span


def gather(span: Span, everyone: torch.Tensor | None, mine: torch.Tensor, root: Root, call: str) -> None:
    """``(n,)`` → ``(W, n)``, bytes, by rank; ``everyone`` is the root's. ``call``: in words, the same on all ranks."""
    local = len(span.hosts.local_ranks)
    chunks = chunks_of_rooted(span.choice.cluster, span.choice.host, len(mine), span.size)
    beside = span.beside_rails(chunks)
    of_host = two_buffers(mine, local, chunks) if root.on_rail else None
    of_all = two_buffers(mine, span.size, chunks) if root.here else None

    def begin(chunk: slice) -> Callable[[], None]:
        theirs = None if of_host is None else next(of_host)(chunk)
        span.within.gather(theirs, mine[chunk], root.in_this_host, group=span.group, config=beside)
        if theirs is None:
            return _nothing
        arrived = None if of_all is None else next(of_all)(chunk)
        wait = span.rail.gather(arrived, theirs, root.host, call)

        def finish() -> None:
            wait()
            if arrived is not None and everyone is not None:
                span.order.write(everyone[:, chunk], arrived)

        return finish

    for _ in one_ahead(chunks, begin):
        pass


def scatter(span: Span, mine: torch.Tensor, everyone: torch.Tensor | None, root: Root, call: str) -> None:
    """``(W, n)`` → ``(n,)``, bytes; ``everyone`` is the root's, by rank, in rows. ``call`` is as for `gather`."""
    local = len(span.hosts.local_ranks)
    chunks = chunks_of_rooted(span.choice.cluster, span.choice.host, len(mine), span.size)
    beside = span.beside_rails(chunks)
    of_host = two_buffers(mine, local, chunks) if root.on_rail else None

    def begin(chunk: slice) -> Callable[[], None]:
        theirs, wait = None, _nothing
        if of_host is not None:
            theirs = next(of_host)(chunk)
            sent = None if everyone is None else span.order.by_host(everyone[:, chunk]).contiguous()
            wait = span.rail.scatter(theirs, sent, root.host, call)

        def finish() -> None:
            wait()
            span.within.scatter(mine[chunk], theirs, root.in_this_host, group=span.group, config=beside)

        return finish

    for _ in one_ahead(chunks, begin):
        pass


def reduce(
    span: Span, total: torch.Tensor | None, input: torch.Tensor, root: Root, op: Any, call: str, sent: Partials
) -> None:
    """Of contiguous tensors of one size; ``total`` is the root's, and may be its ``input``.

    ``sent``: in which form hosts send their sums. ``call`` is as for `gather`. What a chunk is summed up to is written
    where this chunk of the input was, which has been read.
    """
    flat, size, number = input.view(-1), input.itemsize, len(span.hosts)
    chunks = chunks_of_rooted(span.choice.cluster, span.choice.host, input.nbytes, number, reduces=True)
    beside = span.beside_rails(chunks)
    of_host = two_buffers(input, 1, chunks, sent.dtype) if root.on_rail else None
    of_hosts = two_buffers(input, number, chunks, sent.dtype) if root.here else None

    def begin(chunk: slice) -> Callable[[], None]:
        elements = slice(chunk.start // size, chunk.stop // size)
        sums = None if of_host is None else next(of_host)(chunk)[0]
        summands = flat[elements].to(sent.dtype)
        span.within.reduce(sums, summands, root.in_this_host, op=sent.op, group=span.group, config=beside)
        if sums is None:
            return _nothing
        arrived = None if of_hosts is None else next(of_hosts)(chunk)
        wait = span.rail.gather(arrived, sums, root.host, call)

        def finish() -> None:
            wait()
            if arrived is not None and total is not None:
                add_up(total.view(-1)[elements], arrived, reduction(op)[0], span.stream(), sent.summands)

        return finish

    for _ in one_ahead(chunks, begin):
        pass


def _nothing() -> None:
    """Finishes what this rank has done its part of."""
