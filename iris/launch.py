"""Launching a kernel of the library's own, at the cost of the driver's call and not of the JIT's argument handling."""

from collections.abc import Callable
from typing import Any

from iris import simulator
from iris.language.target import launches_early


def prepare(kernel: Any, grid: tuple[int, int, int], *args: Any, num_warps: int) -> Callable[..., None]:
    """Compile and load ``kernel`` for ``args`` now; the result, called with a stream's handle and args, launches it.

    The host neither synchronises nor compiles in the launches themselves. They may have other arguments of the same
    kinds: numbers of the same divisibility by 16, and in the place of a tensor another of the same dtype and
    divisibility of its address, or that address as a number. Whoever launches keeps what is behind an address alive. In
    the simulator, which has no streams, the handle is None, and tensors stay tensors.

    Where the GPU can, a launch begins while the one before it on the stream ends, so the kernel waits before it touches
    memory: `follow_predecessor` of `iris.language.ordering`.
    """
    if simulator.ACTIVE:
        return lambda stream, args: kernel[grid](*args, num_warps=num_warps)
    options = {"launch_pdl": True} if launches_early() else {}
    compiled = kernel.warmup(*args, grid=grid, num_warps=num_warps, **options)
    compiled[grid]  # loads it
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    x, y, z = grid

    def launch(stream: int, args: tuple) -> None:
        # As `compiled[grid](*args, stream=stream)`, without asking for Triton's launch hooks.
        run(x, y, z, stream, function, metadata, None, None, None, *args)

    return launch
