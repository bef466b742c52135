"""When Iris pays over several hosts: arithmetic from what was measured within a host, as no network was measured.

H hosts have L GPUs each, and a GPU sends N bytes a second to other hosts: W = H L ranks. What a rank sends, in bytes,
where S is a whole (of an all_gather the output, of a reduce_scatter the input), and a product is M x K by K x N:

| | along the rail | to GPUs of the host |
| --- | --- | --- |
| all_gather | (H - 1) S / W | (L - 1) S / L |
| reduce_scatter | (H - 1) S / W | (L - 1) S / L |
| all_reduce | 2 (H - 1) S / W | 2 (L - 1) S / L |
| all_gather_matmul | as all_gather of A | as all_gather of A |
| matmul_reduce_scatter | as reduce_scatter of the M x N sums | as reduce_scatter of these |

NCCL's rings send (W - 1) S / W through each GPU, twice for an all_reduce, over the L links of a host to the next one:
L N bytes a second at best, and what NVLink gives ("bus bandwidth" of nccl-tests, doc/PERFORMANCE.md). On 2 hosts an
all_reduce goes by NVLSTree instead: each GPU sends 1 / L of the sums to the other host, and the switch of a host adds.

Latencies are left out, so this says nothing of less than some MiB.
"""

from dataclasses import dataclass
from typing import NamedTuple

from iris.errors import InvalidValueError

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
# With the collective that NCCL has before or behind the GEMM.
FUSED = {"all_gather_matmul": "all_gather", "matmul_reduce_scatter": "reduce_scatter"}
# Of bf16.
ITEMSIZE = 2

# What NVLink lets NCCL do on 8 H100, GB/s of bus bandwidth: rings, and an all_reduce that the switch adds up, as NCCL's
# author has it (NVIDIA/nccl-tests#212).
RINGS_AT_BEST_GBps, NVLS_AT_BEST_GBps = 370.0, 480.0
# What a user has measured on hosts of 8 H100 with 400 Gb/s a GPU (NVIDIA/nccl#1221): all_reduce on 2 hosts by NVLSTree,
# GB/s; and by rings, as a part of L N, which is 400 there, on 2 hosts and on 4. Here these stand for all_gather and
# reduce_scatter, too.
NVLS_TREE_GBps = 430.0
RINGS_ON_TWO, RINGS = 330 / 400, 320 / 400

# Pieces of an all_reduce, of which one is exchanged while others are added up. The rest comes by hosts: H pieces.
PIECES = 8


@dataclass(frozen=True)
class Measured:
    """What was measured within a host, GB/s that a GPU sends to others and TFLOPS of a GPU.

    ``all_gather``, ``reduce_scatter``, ``all_reduce``: bus bandwidth of Iris' collectives. ``stores``: of a kernel
    alone; ``beside``: beside a product, which has ``slowed`` of its speed meanwhile. ``memory``: of a GPU's own.
    """

    all_gather: float
    reduce_scatter: float
    all_reduce: float
    stores: float
    beside: float
    slowed: float
    gemm: float
    memory: float


@dataclass(frozen=True)
class Cluster:
    """``network``: GB/s from each GPU to other hosts."""

    hosts: int
    gpus: int
    network: float

    @property
    def ranks(self) -> int:
        return self.hosts * self.gpus


class Row(NamedTuple):
    """Microseconds of a call, and of its parts alone.

    ``bound``: everything at once, the longest part; ``overlapped``: the rail beside the rest, by hosts or pieces, and
    a product beside stores, as that was measured; ``in_steps``: the rail before or behind the rest. ``nccl_bound``:
    what links let NCCL do; ``nccl``: at the rate that others have measured. Both with the GEMM behind or in front.
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
    H, L, W = cluster.hosts, cluster.gpus, cluster.ranks
    times = 2 if name == "all_reduce" else 1
    rail = us(times * (H - 1) * nbytes / W, cluster.network)
    in_host = us(times * (L - 1) * nbytes / L, getattr(measured, name))
    if name != "all_gather":
        in_host += add_up(nbytes / W, cluster, measured)
    if name == "all_gather":
        in_steps = max(rail, in_host / H) + in_host * (H - 1) / H
    elif name == "reduce_scatter":
        in_steps = in_host + rail
    else:
        # A reduce_scatter, and an all_gather whose own part the rail brings others beside.
        in_steps = in_host / 2 + rail / 2 + max(rail / 2, in_host / 2 / H) + in_host / 2 * (H - 1) / H
    overlapped = max(in_host, rail + in_host / (PIECES if name == "all_reduce" else H))
    size = f"{nbytes / 2**20:g} MiB"
    nccl_bound, nccl = vendor(name, nbytes, cluster)
    return Row(name, size, H, rail, in_host, 0.0, max(rail, in_host), overlapped, in_steps, nccl_bound, nccl)


def fused(name: str, shape: tuple[int, int, int], cluster: Cluster, measured: Measured) -> Row:
    """Of a product of these M, N and K, in bf16, of which each rank computes 1 / W.

    Raises `InvalidValueError` if the ranks cannot share it.
    """
    (M, N, K), H, L, W = shape, cluster.hosts, cluster.gpus, cluster.ranks
    shared = {"M": M, "N": N} if name == "all_gather_matmul" else {"M": M, "K": K}
    for letter, size in shared.items():
        if size % W:
            raise InvalidValueError(
                f"{name} of {M}x{N}x{K} cannot be shared by {W} ranks, {H} hosts of {L}: {letter}={size} is no "
                f"multiple of {W}. Use another shape, or fewer hosts."
            )
    nbytes = ITEMSIZE * M * (K if name == "all_gather_matmul" else N)
    rail = us((H - 1) * nbytes / W, cluster.network)
    sent = (L - 1) * nbytes / L
    added = 0.0 if name == "all_gather_matmul" else add_up(nbytes / W, cluster, measured)
    in_host, product = us(sent, measured.stores) + added, 2 * M * N * K / W / measured.gemm / 1e6
    together = beside(us(sent, measured.beside), product, measured.slowed) + added
    overlapped = max(together, rail + together / H)
    nccl_bound, nccl = vendor(FUSED[name], nbytes, cluster)
    return Row(
        name,
        f"{M} × {N} × {K}",
        H,
        rail,
        in_host,
        product,
        bound=max(rail, in_host, product),
        overlapped=overlapped,
        in_steps=rail + together,
        nccl_bound=nccl_bound + product,
        nccl=nccl + product,
    )


def beside(stores_us: float, product_us: float, slowed: float) -> float:
    """How long stores and a product take at once: the product is slowed while the stores last."""
    return stores_us + max(0.0, product_us - slowed * stores_us)


def vendor(name: str, nbytes: int, cluster: Cluster) -> tuple[float, float]:
    """Microseconds of NCCL's collective: at best, and at the rate that others have measured."""
    H, L, W = cluster.hosts, cluster.gpus, cluster.ranks
    bus_bytes = (2 if name == "all_reduce" else 1) * (W - 1) * nbytes / W
    links = L * cluster.network
    at_best = us(bus_bytes, min(links, RINGS_AT_BEST_GBps))
    usual = max(at_best, us(bus_bytes, links * (RINGS_ON_TWO if H == 2 else RINGS)))
    if name == "all_reduce" and H == 2:
        network = us(nbytes / L, cluster.network)
        at_best = min(at_best, max(network, us(bus_bytes, NVLS_AT_BEST_GBps)))
        usual = min(usual, max(network, us(bus_bytes, NVLS_TREE_GBps)))
    return at_best, usual


def add_up(share: float, cluster: Cluster, measured: Measured) -> float:
    """Microseconds to add what has come from all hosts: each of these parts is read, and the sum written."""
    return us((cluster.hosts + 1) * share, measured.memory)


def us(nbytes: float, GBps: float) -> float:
    return nbytes / GBps / 1e3
