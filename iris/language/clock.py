"""The clocks that a kernel can read."""

import triton
import triton.language as tl

from iris.language.address import in_simulator
from iris.language.jit import jit
from iris.language.target import on_nvidia


@triton.constexpr_function
def host_nanoseconds():
    import time

    return time.monotonic_ns()


@jit
def clock():
    """Nanoseconds on the clock of this GPU, which all of its programs share. Each thread reads it by itself.

    The compiler keeps it in order with memory operations. In the simulator it is the host's clock.
    """
    if in_simulator():
        return host_nanoseconds()
    elif on_nvidia():
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,~{memory}", [], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        # s_memrealtime counts at 100 MHz on CDNA (AMD Instinct MI300 ISA, "S_MEMREALTIME").
        return 10 * tl.inline_asm_elementwise(
            "s_memrealtime $0\n\ts_waitcnt lgkmcnt(0)", "=s,~{memory}", [], dtype=tl.int64, is_pure=False, pack=1
        )


@jit
def cycles():
    """The cycle counter of this multiprocessor, on NVIDIA: fast to read. Those of two multiprocessors do not agree."""
    if in_simulator():
        return host_nanoseconds()
    else:
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %clock64;", "=l,~{memory}", [], dtype=tl.int64, is_pure=False, pack=1
        )
