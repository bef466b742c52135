"""A product beside a rail: how much room it leaves for the rail's kernel, and whether that pays.

The kernel of a fused operation takes a multiprocessor with each program, and its programs wait for those of the host's
other ranks. NCCL's kernel waits for other hosts. Both are over in the end if NCCL's always finds room:

1. A kernel here has `programs_beside_rails` programs at most. So there are multiprocessors that it never takes.
2. A transfer is enqueued before the product that runs beside it, and begins there. It waits for the transfers of other
   hosts alone, which begin alike, whatever their products wait for.
3. So each transfer ends, and leaves the rest of the GPU to the product. Where NCCL has more thread blocks than there is
   room for, they take turns: each waits for the same one of another host, and they begin in the same order everywhere.
4. What a product waits for are products of the same call, which get their room by 3.

The vendor's GEMM waits for nobody. A collective of Iris that follows it leaves as much room.
"""

import functools
from dataclasses import replace
from typing import NamedTuple

from iris.ccl.chunks import NEXT_TRANSFER_US, programs_beside_rails
from iris.ccl.cluster import Cluster, HostFigures, us
from iris.ccl.select_over_hosts import HostChoice
from iris.ops.config import FusedConfig

# Multiprocessors of H100 and H200, which were measured. All hosts have to choose alike, whatever their GPUs are.
SMS = 132


@functools.lru_cache(maxsize=256)
def leaving_room(config: FusedConfig, programs: int) -> FusedConfig:
    """The configuration with as many programs as run beside a rail; ``programs``: as many as there may be else."""
    most = programs_beside_rails(programs)
    return config if most is None else replace(config, num_sms=min(config.num_sms or programs, most))


def beside_stores_us(stores_us: float, product_us: float, slowed: float) -> float:
    """Stores to peers and a product at once: the product has the speed ``slowed`` of 1 while the stores last."""
    return stores_us + max(0.0, product_us - slowed * stores_us)


class Loop(NamedTuple):
    """A loop over hosts: what its parts within a host take together, and bytes of a transfer."""

    stores_us: float
    product_us: float
    slowed: float
    nbytes: float

    def part_us(self, hosts: int) -> float:
        """That of one host, on all multiprocessors."""
        return beside_stores_us(self.stores_us / hosts, self.product_us / hosts, self.slowed)

    def lost_us(self, hosts: int) -> float:
        """By how much longer it takes beside a rail, where the product has fewer of them."""
        longer = self.product_us * SMS / (programs_beside_rails(SMS) or SMS)
        return beside_stores_us(self.stores_us / hosts, longer / hosts, self.slowed) - self.part_us(hosts)

    def pays(self, cluster: Cluster, host: HostFigures) -> bool:
        """Whether products run beside transfers, which would else come before, or after."""
        return self._transfer_us(cluster, host) > self.lost_us(cluster.num_hosts)

    def us(self, cluster: Cluster, host: HostFigures) -> float:
        """How long it takes: as `iris.ops.over_hosts` says where that pays, and else by turns."""
        H, part, transfer = cluster.num_hosts, self.part_us(cluster.num_hosts), self._transfer_us(cluster, host)
        if not self.pays(cluster, host):
            return (H - 1) * transfer + H * part
        next_one = NEXT_TRANSFER_US + us(self.nbytes, cluster.network_GBps)
        return max((H - 1) * self.lost_us(H) + H * part, transfer + (H - 2) * next_one + part)

    def _transfer_us(self, cluster: Cluster, host: HostFigures) -> float:
        return host.transfer_us + us(self.nbytes, cluster.network_GBps)


def loop(choice: HostChoice, nbytes: int, operations: float, itemsize: int) -> Loop:
    """Of transfers of so many bytes, and as many to each peer within the host for each host.

    ``operations``: of all parts, of elements of so many bytes.
    """
    H, L, figures = choice.cluster.num_hosts, choice.cluster.ranks_per_host, choice.product
    stores_us, product_us = us(H * (L - 1) * nbytes, figures.stores_GBps), figures.us(operations, itemsize)
    return Loop(stores_us, product_us, figures.slowed(itemsize), nbytes)
