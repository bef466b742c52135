"""Collectives over hosts in chunks: a rail moves one while the ranks of each host work on another.

Let r be the time of a rail, s that of a step within the host for the part of one host, and H the number of hosts. In
one chunk the rail works beside the own host's step alone, so all_gather and reduce_scatter take

    max(r, s) + (H - 1) s

which is longer by e = min(r - s, (H - 1) s) than max(r, H s), if e > 0: else the rail is hidden as it is. An all_to_all
has one step s for all hosts after its rail, and so have collectives with a root, before or after: e = min(r, s). In C
chunks calls take about

    max(r, H s) + e / C + C f

where f is what a chunk takes however small it is: a transfer has to start, and so has a kernel for each host. One chunk
more than C pays while e / (C (C + 1)) > f, which gives C = round(sqrt(1 / 4 + e / f)).

A rail reaches its rate with messages of some MiB only, so no chunk is below `LEAST_BYTES`. And at `MOST` chunks an
eighth of e is left, of which more chunks would hide little. Of gather, scatter and reduce, whose root has room for two
chunks besides, no chunk is above `MOST_ROOM` there.

For example, on 4 hosts of 8 ranks with 50 GB/s each between hosts and 290 within, and parts of 16 MiB a rank: r = 1007
us, s = 7 * 16 MiB / 290 GB/s = 405 us, e = 602 us, f = 15 + 4 * 12 us, so C = 3: 1620 + 201 + 189 us, and not 2222.
On 2 such hosts r < s, so there is one chunk.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from iris.ccl.cluster import Cluster, HostFigures, us

Chunk = TypeVar("Chunk")

MOST = 8
# Of what a rank sends along its rail in a chunk.
LEAST_BYTES = 4 << 20
# Of what comes to the root, or goes from it, in a chunk of gather, scatter and reduce: it has room for two. On a rail
# of 50 GB/s so much takes some 50 times what a chunk more does.
MOST_ROOM = 64 << 20
# What a transfer of NCCL takes to start, where others are before it. An assumption: nobody has measured it.
NEXT_TRANSFER_US = 15.0
# Every chunk begins at a multiple of so many bytes: what a thread loads at once, and a multiple of any element.
ALIGNMENT = 16
# Thread blocks of a kernel of NCCL, as people have counted them (NVIDIA/nccl#2421). What limits those of collectives
# (NCCL User Guide, "ncclConfig_t": ``maxCTAs``) does not limit an exchange.
NCCL_CTAS = 32
# Multiprocessors that are left besides, for the first programs of another stream's launch (`Communicator.programs`).
FOR_OTHER_STREAMS = 4


def number_of_chunks(host: HostFigures, exposed_us: float, on_rail: int, kernels: int) -> int:
    """Of a collective in which a rank sends so many bytes to other hosts.

    ``exposed_us``: e, see above; ``kernels``: of a chunk, within the host.
    """
    fixed_us = NEXT_TRANSFER_US + kernels * host.small_us
    best = round(math.sqrt(0.25 + max(0.0, exposed_us) / fixed_us))
    return max(1, min(best, on_rail // LEAST_BYTES, MOST))


def chunks_of_part(cluster: Cluster, host: HostFigures, nbytes: int) -> list[slice]:
    """Of a collective in which a rail takes a part of so many bytes to, or from, each other host.

    Within its host a rank sends one to each other, for each host. all_reduce does both twice: as many chunks are best.
    """
    H, L = cluster.num_hosts, cluster.ranks_per_host
    on_rail = (H - 1) * nbytes
    rail_us, step_us = us(on_rail, cluster.network_GBps), us((L - 1) * nbytes, host.all_gather_GBps)
    exposed_us = min(rail_us - step_us, (H - 1) * step_us)
    return cut(nbytes, number_of_chunks(host, exposed_us, on_rail, H))


def chunks_of_exchange(cluster: Cluster, host: HostFigures, rows: int, columns: int) -> list[slice]:
    """Of an all_to_all in which each rank sends each so many rows of so many bytes: of the rows, or of the only one."""
    H, L = cluster.num_hosts, cluster.ranks_per_host
    on_rail, in_host = (H - 1) * L * rows * columns, (L - 1) * H * rows * columns
    exposed_us = min(us(on_rail, cluster.network_GBps), us(in_host, host.all_gather_GBps))
    number = number_of_chunks(host, exposed_us, on_rail, 1)
    return cut(columns, number) if rows == 1 else cut(rows, number, 1)


def chunks_of_whole(cluster: Cluster, host: HostFigures, nbytes: int) -> list[slice]:
    """Of a broadcast of so many bytes, which go to the other hosts, and to all ranks of each."""
    in_host_us = us(nbytes, host.all_gather_GBps) if cluster.ranks_per_host > 1 else 0.0
    return cut(nbytes, number_of_chunks(host, min(us(nbytes, cluster.network_GBps), in_host_us), nbytes, 1))


def chunks_of_rooted(cluster: Cluster, host: HostFigures, nbytes: int, rows: int, reduces: bool = False) -> list[slice]:
    """Of a gather or scatter of so many bytes of each rank, or of a reduce of so many.

    ``rows``: as many bytes each come to the root for all ranks, or for all hosts.
    """
    H, L = cluster.num_hosts, cluster.ranks_per_host
    on_rail = (H - 1) * rows // H * nbytes
    in_host_us = us((1 if reduces else L - 1) * nbytes, host.all_gather_GBps) if L > 1 else 0.0
    exposed_us = min(us(on_rail, cluster.network_GBps), in_host_us)
    return cut(nbytes, max(number_of_chunks(host, exposed_us, on_rail, 1), math.ceil(rows * nbytes / MOST_ROOM)))


def cut(length: int, number: int, alignment: int = ALIGNMENT) -> list[slice]:
    """So many chunks of a ``length`` in bytes, or fewer where it is short; the last one may be smaller."""
    step = max(1, math.ceil(length / number / alignment)) * alignment
    return [slice(begin, min(begin + step, length)) for begin in range(0, length, step)]


def programs_beside_rails(num_sms: int) -> int | None:
    """How many programs a step within the host may have, so that NCCL's kernel finds room beside it; None: any number.

    Of either a block may fill a multiprocessor: so many are left as NCCL may take; of a GPU with few of them, half.
    Neither kernel waits for the other. But one of them would run after the other, and launches of two streams could
    find no room beside a kernel of NCCL, which waits for another host.
    """
    return max(num_sms - NCCL_CTAS - FOR_OTHER_STREAMS, num_sms // 2) or None


def two_buffers(
    like: torch.Tensor, rows: int, chunks: list[slice], dtype: torch.dtype | None = None
) -> Iterator[Callable[[slice], torch.Tensor]]:
    """Room for a chunk of so many rows, and for the next one, by turns, on the device of ``like``.

    Each is a function of the chunk, which is bytes of ``like``. It gives a contiguous tensor ``(rows, n)`` for as many
    elements as the chunk has, of ``dtype``, by default that of ``like``. Who takes it again, for the next chunk but
    one, has done with it.
    """
    longest = max(chunk.stop - chunk.start for chunk in chunks) // like.itemsize
    memory = like.new_empty(min(2, len(chunks)), rows * longest, dtype=dtype)

    def of(buffer: torch.Tensor, chunk: slice) -> torch.Tensor:
        n = (chunk.stop - chunk.start) // like.itemsize
        return buffer[: rows * n].view(rows, n)

    return itertools.cycle([functools.partial(of, buffer) for buffer in memory])


def one_ahead(chunks: Iterable[Chunk], begin: Callable[[Chunk], Callable[[], None]]) -> Iterator[Chunk]:
    """``begin`` each chunk, which returns what finishes it, and finish it after the begin of the next one.

    Each is yielded when it is finished. So two are under way at most, and a third may use the buffers of the first.
    """
    last: list[tuple[Chunk, Callable[[], None]]] = []
    for chunk in chunks:
        last.append((chunk, begin(chunk)))
        if len(last) == 2:
            done, finish = last.pop(0)
            finish()
            yield done
    for done, finish in last:
        finish()
        yield done
