"""When Iris pays over several hosts: arithmetic from what was measured within a host, as no network was measured.

What is done today, and what NCCL's algorithms take, is in `iris.ccl.predict_over_hosts`, by which calls are chosen too.
Here are the bounds of what could be done, and fused operations: of a product of M x K by K x N, all_gather_matmul moves
A as an all_gather of it does, and matmul_reduce_scatter the sums, M x N, as a reduce_scatter of these does.

Of what is done today, latencies count, as they decide on chunks (`iris.ccl.chunks`). Elsewhere they are left out, so
this says nothing of less than some MiB.
"""

from dataclasses import dataclass
from typing import NamedTuple

from iris.ccl.cluster import Cluster, HostFigures, us
from iris.ccl.predict_over_hosts import add_up_us, rail_us, steps, vendor
from iris.errors import InvalidValueError
from iris.ops.beside_rails import Loop, beside_stores_us

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
# With the collective that NCCL has before or after the GEMM.
FUSED = {"all_gather_matmul": "all_gather", "matmul_reduce_scatter": "reduce_scatter"}
# Of bf16.
ITEMSIZE = 2
# Pieces of an all_reduce, of which one is exchanged while others are added up. The rest comes by hosts: H pieces.
PIECES = 8


@dataclass(frozen=True)
class Measured:
    """What was measured within a host, of one GPU.

    ``host``: what collectives take. In GB/s ``stores``: what a kernel stores to peers, alone;
    ``beside``: beside a product, which has ``slowed`` of its speed meanwhile. ``gemm``: TFLOPS of the vendor's GEMM.
    """

    host: HostFigures
    stores: float
    beside: float
    slowed: float
    gemm: float


class Row(NamedTuple):
    """Microseconds of a call, and of its parts alone.

    ``bound``: everything at once, the longest part; ``overlapped``: the rail beside the rest, by hosts or pieces, and
    a product beside stores, as that was measured; ``in_steps``: as it is done today. ``nccl_bound``: what links let
    NCCL do; ``nccl``: at the rate that others have measured. Both with the GEMM after or before.
    """

    what: str
    size: str
    hosts: int
    rail: float
    in_host: float
    product: float
    bound: float
    overlapped: float
    in_steps: float
    nccl_bound: float
    nccl: float

    @property
    def gain(self) -> float:
        """How many times as fast as NCCL: bound against bound."""
        return self.nccl_bound / self.bound

    @property
    def expected_gain(self) -> float:
        """The same of what is expected of both."""
        return self.nccl / self.overlapped


def collective(name: str, nbytes: int, cluster: Cluster, measured: Measured) -> Row:
    """Of ``nbytes`` in all: an all_gather's output, a reduce_scatter's or an all_reduce's input."""
    ideal = measured.host.without_latencies()
    rail, in_host, _ = steps(name, nbytes, cluster, ideal)
    pieces = PIECES if name == "all_reduce" else cluster.num_hosts
    known = vendor(name, nbytes, cluster, ideal)
    return Row(
        name,
        f"{nbytes / 2**20:g} MiB",
        cluster.num_hosts,
        rail,
        in_host,
        product=0.0,
        bound=max(rail, in_host),
        overlapped=max(in_host, rail + in_host / pieces),
        in_steps=steps(name, nbytes, cluster, measured.host).total,
        nccl_bound=known.at_best,
        nccl=known.measured,
    )


def fused(name: str, shape: tuple[int, int, int], cluster: Cluster, measured: Measured) -> Row:
    """Of a product of these M, N and K, in bf16, of which each rank computes 1 / W.

    Raises `InvalidValueError` if the ranks cannot share it.
    """
    (M, N, K), H, L, W = shape, cluster.num_hosts, cluster.ranks_per_host, cluster.num_ranks
    shared = {"M": M, "N": N} if name == "all_gather_matmul" else {"M": M, "K": K}
    for letter, size in shared.items():
        if size % W:
            raise InvalidValueError(
                f"{name} of {M}x{N}x{K} cannot be shared by {W} ranks, {H} hosts of {L}: {letter}={size} is no "
                f"multiple of {W}. Use another shape, or fewer hosts."
            )
    nbytes = ITEMSIZE * M * (K if name == "all_gather_matmul" else N)
    ideal, sent = measured.host.without_latencies(), (L - 1) * nbytes / L
    rail = rail_us(nbytes, cluster, ideal)
    added = 0.0 if name == "all_gather_matmul" else add_up_us(nbytes / W, cluster, ideal)
    in_host, product = us(sent, measured.stores) + added, 2 * M * N * K / W / measured.gemm / 1e6
    stores = us(sent, measured.beside)
    together = beside_stores_us(stores, product, measured.slowed) + added
    as_it_goes = Loop(stores, product, measured.slowed, nbytes / W)
    known = vendor(FUSED[name], nbytes, cluster, ideal)
    return Row(
        name,
        f"{M} × {N} × {K}",
        H,
        rail,
        in_host,
        product,
        bound=max(rail, in_host, product),
        overlapped=max(together, rail + together / H),
        in_steps=as_it_goes.us(cluster, measured.host) + added,
        nccl_bound=known.at_best + product,
        nccl=known.measured + product,
    )
