"""What is known of several hosts and of their GPUs, by which the time of a collective is computed."""

from typing import NamedTuple


class Cluster(NamedTuple):
    """``network_GBps``: from each rank to other hosts, both ways at once, whatever the other ranks send."""

    num_hosts: int
    ranks_per_host: int
    network_GBps: float

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.ranks_per_host


class HostFigures(NamedTuple):
    """Of one rank and its GPU, within a host.

    ``all_gather_GBps``, ``reduce_scatter_GBps``: what it sends to the others in Iris' collectives. ``link_GBps``: what
    its copy engine sends to one of them. ``memory_GBps``: of its own memory. ``small_us``: the least that a collective
    within the host takes. ``transfer_us``: the least that a transfer along a rail takes, or a call of the vendor.
    """

    all_gather_GBps: float
    reduce_scatter_GBps: float
    link_GBps: float
    memory_GBps: float
    small_us: float
    transfer_us: float

    def without_latencies(self) -> "HostFigures":
        """Where the least that anything takes is nothing."""
        return self._replace(small_us=0.0, transfer_us=0.0)


class ProductFigures(NamedTuple):
    """Of products within a host.

    By bytes of an element, 1 and 2: ``TFLOPS`` of the vendor's GEMM; ``speed_beside_stores``, of 1, while a product
    stores to peers. ``stores_GBps``: what it stores then.
    """

    TFLOPS: dict[int, float]
    speed_beside_stores: dict[int, float]
    stores_GBps: float

    def us(self, operations: float, itemsize: int) -> float:
        """Microseconds of a product."""
        # Of float32 nothing was measured. TF32 has half the speed of 16 bits (NVIDIA, "H100 Tensor Core GPU
        # Architecture").
        return operations / self.TFLOPS.get(itemsize, self.TFLOPS[2] / 2) / 1e6

    def slowed(self, itemsize: int) -> float:
        """Its speed beside stores."""
        return self.speed_beside_stores.get(itemsize, self.speed_beside_stores[2])


def us(nbytes: float, GBps: float) -> float:
    """Microseconds of so many bytes."""
    return nbytes / GBps / 1e3
