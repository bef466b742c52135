"""How many NVLinks connect two GPUs, which torch can tell for its symmetric memory.

`torch._C._distributed_c10d._detect_dma_connectivity` and `torch._C._autograd.DeviceType` are there in torch 2.9 to
2.13, but not in every build. Where one is gone, the number is 0.
"""

from iris.compat.parts import optional


def nvlinks(i: int, j: int) -> int:
    """The number of NVLinks between GPU ``i`` and GPU ``j``; 0 also where torch cannot tell."""
    detect = optional("torch._C._distributed_c10d:_detect_dma_connectivity")
    cuda = optional("torch._C._autograd:DeviceType.CUDA")
    if detect is None or cuda is None:
        return 0
    try:
        return detect(cuda, "nvlink").matrix[i][j]
    except (RuntimeError, IndexError):
        return 0
