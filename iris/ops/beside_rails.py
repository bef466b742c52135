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

from iris.ccl.chunks import programs_beside_rails
from iris.ccl.cluster import us
from iris.ccl.select_over_hosts import HostChoice
from iris.machine.figures import Figures
from iris.ops.config import FusedConfig


@functools.lru_cache(maxsize=256)
def leaving_room(config: FusedConfig, programs: int) -> FusedConfig:
    """The configuration with as many programs as run beside a rail; ``programs``: as many as there may be else."""
    most = programs_beside_rails(programs)
    return config if most is None else replace(config, num_sms=min(config.num_sms or programs, most))


def beside_stores_us(stores_us: float, product_us: float, slowed: float) -> float:
    """Stores to peers and a product at once: the product has the speed ``slowed`` of 1 while the stores last."""
    return stores_us + max(0.0, product_us - slowed * stores_us)


def lost_us(stores_us: float, product_us: float, slowed: float, programs: int) -> float:
    """By how much longer that takes beside a rail, where the product has fewer multiprocessors.

    It pays where a transfer takes longer, which would else come before, or behind.
    """
    left = programs_beside_rails(programs) or programs
    longer = beside_stores_us(stores_us, product_us * programs / left, slowed)
    return longer - beside_stores_us(stores_us, product_us, slowed)


def pays(choice: HostChoice, gpu: Figures, programs: int, nbytes: int, flops: float, itemsize: int) -> bool:
    """Whether a product runs beside a transfer of so many bytes.

    It has so many operations, of elements of so many bytes. Each peer within the host gets as many bytes meanwhile.
    """
    # Of float32 nothing was measured. TF32 is half as fast as 16 bits (NVIDIA, "H100 Tensor Core GPU Architecture").
    rate = gpu.gemm_TFLOPS.get(itemsize, gpu.gemm_TFLOPS[2] / 2)
    slowed = gpu.product_speed_beside_stores.get(itemsize, gpu.product_speed_beside_stores[2])
    stores_us = us((choice.cluster.ranks_per_host - 1) * nbytes, gpu.stores_beside_product_GBps)
    transfer_us = choice.host.transfer_us + us(nbytes, choice.cluster.network_GBps)
    return transfer_us > lost_us(stores_us, flops / rate / 1e6, slowed, programs)
