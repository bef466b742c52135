"""Launching a kernel of the library's own, at the cost of the driver's call and not of the JIT's argument handling."""

from collections.abc import Callable
from typing import Any

from iris import simulator


def prepare(kernel: Any, grid: tuple[int, int, int], *args: Any, num_warps: int) -> Callable[[int | None], None]:
    """Compile and load ``kernel`` for ``args`` now; the result launches it on the stream whose handle it gets.

    The host neither synchronises nor compiles in the launches themselves. The arguments are kept alive. In the
    simulator, which has no streams, the handle is None.
    """
    if simulator.ACTIVE:
        return lambda stream: kernel[grid](*args, num_warps=num_warps)
    compiled = kernel.warmup(*args, grid=grid, num_warps=num_warps)
    launch = compiled[grid]
    return lambda stream: launch(*args, stream=stream)
