"""How long a collective over several hosts takes, by arithmetic: Iris' steps, and the vendor's algorithms.

`iris.ccl.select_over_hosts` chooses a call by it, and ``python -m iris model hosts`` shows it. Times are in microseconds,
rates in GB/s, which are 10^3 bytes a microsecond.

    S        bytes of the whole: input of a sum or all_to_all, output of all_gather, tensor of broadcast and reduce
    H, L     hosts, and ranks on each;  W = H L
    network  `Cluster.network_GBps`
    rate     what a rank sends within its host: `HostFigures.all_gather_GBps`, for sums `reduce_scatter_GBps`
    links    what the vendor's algorithm carries within a host: a part of `HostFigures.link_GBps`
    fixed    `HostFigures.transfer_us`

Iris' steps (`iris.ccl.over_hosts`):

| collective | rail | within the host; nothing where L is 1 | adding up |
| --- | --- | --- | --- |
| all_gather | fixed + (H - 1) S / W / network | H times: `small_us` + (L - 1) S / W / rate | |
| reduce_scatter | the same | the same | (H + 1) S / W / memory |
| all_reduce | both of these | both | as reduce_scatter |
| all_to_all | fixed + (H - 1) S / H / network | `small_us` + (L - 1) S / L / rate | |
| broadcast | fixed + S / network | `small_us` + S / rate | |
| reduce | fixed + (H - 1) S / network | the same | (H + 1) S / memory |

They wait for each other. But in the first three the rail works beside the own host's step, and large calls of all go
in chunks: see `iris.ccl.chunks`. A chunk more starts another transfer and other kernels.

The vendor's algorithms, each after one `fixed`:

| collective | algorithm | time |
| --- | --- | --- |
| all_gather, reduce_scatter | a ring of all ranks | (W - 1) S / W / min(L network, links) |
| all_reduce, up to 3 hosts | trees of hosts, in which the switch of a host adds | the longer of (H - 1) 2 S / W / network and 2 (W - 1) S / W / links |
| all_reduce | a ring of all ranks, twice | 2 (W - 1) S / W / min(L network, links) |
| all_to_all | from each rank to each | the longer of (H - 1) S / H / network and (L - 1) S / W / links |
| broadcast, reduce | a chain of all ranks | S / min(L network, links) |
"""  # noqa: E501 (a table)

from typing import NamedTuple

from iris.ccl.chunks import (
    NEXT_TRANSFER_US,
    chunks_of_exchange,
    chunks_of_part,
    chunks_of_rooted,
    chunks_of_whole,
)
from iris.ccl.cluster import Cluster, HostFigures, us

# Within a host of 8 H100, GB/s of bus bandwidth: rings at best, and at best an all_reduce that the switch adds up, as
# NCCL's author has it (NVIDIA/nccl-tests#212); and what a user has measured of all_reduce on 2 such hosts by trees,
# with 50 GB/s from each GPU to the other (NVIDIA/nccl#1221). All as parts of `LINK_GBPS`, what a copy engine of such a
# GPU sends to one peer (benchmarks/results/collectives, copy_engine_GBps).
LINK_GBPS = 388.0
RINGS_AT_BEST, SWITCH_AT_BEST, TREES_MEASURED = 370 / LINK_GBPS, 480 / LINK_GBPS, 430 / LINK_GBPS
# And by rings, as parts of what all GPUs of a host send to other hosts, 400 GB/s there: on 2 hosts, and on 4.
RINGS_MEASURED_ON_TWO, RINGS_MEASURED = 330 / 400, 320 / 400
# Up to so many hosts an all_reduce goes by trees. Of 3 nobody has said anything, and trees are the faster.
HOSTS_OF_TREES = 3


class Steps(NamedTuple):
    """Microseconds of Iris' steps: those of the rail alone, those within the host alone, and all as they are done."""

    rail: float
    in_host: float
    total: float


class Vendor(NamedTuple):
    """Microseconds of the vendor's collective: at best, and at the rate that others have measured.

    Where they have measured nothing, the latter is the former. Of all_gather and reduce_scatter it is that of
    all_reduce by rings.
    """

    at_best: float
    measured: float


def rail_us(nbytes: float, cluster: Cluster, host: HostFigures) -> float:
    """Of the rails' part of an all_gather or reduce_scatter: each rank sends its W-th of the whole to H - 1 others."""
    return host.transfer_us + us((cluster.num_hosts - 1) * nbytes / cluster.num_ranks, cluster.network_GBps)


def add_up_us(share: float, cluster: Cluster, host: HostFigures) -> float:
    """To add what has come from all hosts, ``share`` bytes from each: these are read, and the sum is written."""
    return us((cluster.num_hosts + 1) * share, host.memory_GBps)


def steps(collective: str, nbytes: int, cluster: Cluster, host: HostFigures) -> Steps:
    """Iris' steps of the collective, for a whole of so many bytes."""
    H, L, W = cluster.num_hosts, cluster.ranks_per_host, cluster.num_ranks

    def within(sent: float, rate: float) -> float:
        return host.small_us + us(sent, rate) if L > 1 else 0.0

    def beside(rail: float, step: float, times: int, chunks: int) -> Steps:
        """The rail, and as many steps of the host. In one chunk all but ``exposed`` go on at the same time."""
        exposed = min(rail - step, (times - 1) * step) if times > 1 else min(rail, step)
        more = (chunks - 1) * NEXT_TRANSFER_US, (chunks - 1) * times * within(0, 1)
        total = max(rail + more[0], times * step + more[1]) + max(0.0, exposed) / chunks
        return Steps(rail, times * step, total)

    if collective == "all_reduce":
        first, second = (steps(name, nbytes, cluster, host) for name in ("reduce_scatter", "all_gather"))
        return Steps(*map(sum, zip(first, second, strict=True)))
    if collective in ("all_gather", "reduce_scatter"):
        gathers, part = collective == "all_gather", nbytes // W
        step = within((L - 1) * nbytes / W, host.all_gather_GBps if gathers else host.reduce_scatter_GBps)
        found = beside(rail_us(nbytes, cluster, host), step, H, len(chunks_of_part(cluster, host, part)))
        added = 0.0 if gathers else add_up_us(nbytes / W, cluster, host)
        return Steps(found.rail, found.in_host + added, found.total + added)
    if collective == "all_to_all":
        rail = host.transfer_us + us((H - 1) * nbytes / H, cluster.network_GBps)
        step = within((L - 1) * nbytes / L, host.all_gather_GBps)
        return beside(rail, step, 1, len(chunks_of_exchange(cluster, host, 1, nbytes // W)))
    if collective == "broadcast":
        rail, step = host.transfer_us + us(nbytes, cluster.network_GBps), within(nbytes, host.all_gather_GBps)
        return beside(rail, step, 1, len(chunks_of_whole(cluster, host, nbytes)))
    rail = host.transfer_us + us((H - 1) * nbytes, cluster.network_GBps)
    step, added = within(nbytes, host.reduce_scatter_GBps), add_up_us(nbytes, cluster, host)
    found = beside(rail, step, 1, len(chunks_of_rooted(cluster, host, nbytes, H, reduces=True)))
    return Steps(found.rail, found.in_host + added, found.total + added)


def vendor(collective: str, nbytes: float, cluster: Cluster, host: HostFigures) -> Vendor:
    """The vendor's collective among all ranks, for a whole of so many bytes."""
    H, L, W = cluster.num_hosts, cluster.ranks_per_host, cluster.num_ranks
    cards = L * cluster.network_GBps
    ring = min(cards, RINGS_AT_BEST * host.link_GBps)
    measured_ring = min(ring, cards * (RINGS_MEASURED_ON_TWO if H == 2 else RINGS_MEASURED))

    def of(at_best: float, measured: float | None = None) -> Vendor:
        return Vendor(host.transfer_us + at_best, host.transfer_us + (at_best if measured is None else measured))

    if collective == "all_to_all":
        away = us((H - 1) * nbytes / H, cluster.network_GBps)
        return of(max(away, us((L - 1) * nbytes / W, SWITCH_AT_BEST * host.link_GBps)))
    if collective in ("broadcast", "reduce"):
        return of(us(nbytes, ring))
    moved = (2 if collective == "all_reduce" else 1) * (W - 1) * nbytes / W
    at_best, measured = us(moved, ring), us(moved, measured_ring)
    if collective == "all_reduce" and H <= HOSTS_OF_TREES:
        # What must cross between hosts, whatever the algorithm.
        network = us(2 * (H - 1) * nbytes / W, cluster.network_GBps)
        at_best = min(at_best, max(network, us(moved, SWITCH_AT_BEST * host.link_GBps)))
        measured = min(measured, max(network, us(moved, TREES_MEASURED * host.link_GBps)))
    return of(at_best, measured)
