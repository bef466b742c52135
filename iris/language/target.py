"""What a kernel is compiled for: questions that device code asks at compile time, and the host may ask, too."""

from typing import Any

import triton

from iris import simulator

BEFORE_3_7 = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7)


# The driver is imported inside the functions: Triton follows every global name of a constexpr_function, and refuses the
# driver's methods there.


@triton.constexpr_function
def backend():
    """ "cuda", "hip" or, in the simulator, "cpu"."""
    from triton.runtime import driver

    return "cpu" if simulator.ACTIVE else driver.active.get_current_target().backend


@triton.constexpr_function
def threads_per_warp():
    """Threads of a warp: 64 on AMD CDNA, 32 elsewhere and in the simulator.

    Call it on the host, or in ``constexpr`` expressions of kernels, for layouts that fit both vendors:
    ``gl.BlockedLayout([1], [iris_gl.threads_per_warp()], [gl.num_warps()], [0])``.
    """
    from triton.runtime import driver

    return 32 if simulator.ACTIVE else driver.active.get_current_target().warp_size


@triton.constexpr_function
def on_nvidia():
    return backend() == "cuda"


@triton.constexpr_function
def on_amd():
    return backend() == "hip"


@triton.constexpr_function
def cas_ignores_its_order():
    """Before 3.7, Triton's AMD back end compiles every compare-and-swap as acq_rel at agent scope."""
    return backend() == "hip" and BEFORE_3_7


@triton.constexpr_function
def launches_early():
    """Whether a launch may take its place while the one before it runs: NVIDIA's, from compute capability 9.0 on."""
    from triton.runtime import driver

    return backend() == "cuda" and driver.active.get_current_target().arch >= 90


def largest_cluster() -> int:
    """The most programs that a cluster may have; 1 where there are no clusters. On the host.

    16 on Hopper and on data-centre Blackwell; 8 on any other GPU with clusters (CUDA C++ Programming Guide, "Thread
    Block Clusters").
    """
    if simulator.ACTIVE:
        return 16
    if not launches_early():
        return 1
    return 16 if architecture() // 10 in (9, 10) else 8


def architecture() -> Any:
    """90 on Hopper, "gfx942" on CDNA3, "simulator" in the simulator. On the host."""
    from triton.runtime import driver

    return "simulator" if simulator.ACTIVE else driver.active.get_current_target().arch
