"""Compiles, loads and launches a kernel by the parts of Triton's JIT that ``kernel[grid](...)`` consists of.

Iris relies on these in Triton 3.6 to 3.9:

* ``kernel.warmup(..., grid=grid)`` compiles without launching, and indexing the result loads it;
* the result has ``run``, the launcher; ``function``, the driver's handle; ``packed_metadata``, which begins with the
  number of warps, the number of CTAs and the bytes of shared memory; and ``n_regs``;
* the arguments of the launcher, and that it calls a C function that is its attribute ``launch``;
* `triton.runtime.jit.mangle_type`, and the backends' classes of options;
* ``kernel[grid]`` calls the method ``run``.

Where one is gone, what needs it raises `MissingPartError`. A launcher without ``launch`` is called as it is, which
takes the host a microsecond longer.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import triton

from iris.compat.parts import function, member, required

_LAUNCHES, _SIMULATES = "launch its kernels", "run kernels on the CPU"

mangle_type = function("triton.runtime.jit:mangle_type", _SIMULATES)
"""The name of an argument's type in a kernel's signature."""


class Loaded(NamedTuple):
    """A kernel that is loaded on the GPU."""

    run: Callable[..., None]
    function: int
    """The driver's handle (CUfunction)."""
    metadata: tuple
    """Number of warps, number of CTAs, bytes of shared memory, and what else the release has."""
    registers: int
    """The number of registers of each thread."""


def load(kernel: Any, grid: tuple[int, int, int], args: tuple, options: dict[str, int]) -> Loaded:
    """Compile a kernel for these arguments and load it, without launching it."""
    compiled = member(kernel, "triton:JITFunction.warmup", _LAUNCHES)(*args, grid=grid, **options)
    compiled[grid]  # loads it
    return Loaded(
        member(compiled, "triton.compiler:CompiledKernel.run", _LAUNCHES),
        member(compiled, "triton.compiler:CompiledKernel.function", _LAUNCHES),
        member(compiled, "triton.compiler:CompiledKernel.packed_metadata", _LAUNCHES),
        member(compiled, "triton.compiler:CompiledKernel.n_regs", _LAUNCHES),
    )


def as_cluster(metadata: tuple, size: int) -> tuple:
    """The metadata with which the launcher launches clusters of ``size`` programs: it takes ``size`` for ``num_ctas``.

    Then it launches as many clusters as the grid has programs.
    """
    num_warps, _, shared = metadata
    return num_warps, size, shared


def launcher(
    run: Any, grid: tuple[int, int, int], function: Any, metadata: Any, args: tuple
) -> Callable[[int, tuple], None]:
    """``run(*grid, stream, function, metadata, None, None, None, *args)`` as a function of stream and arguments.

    ``run``, Triton's launcher, checks for scratch memory at every call, which takes a microsecond, and then calls its C
    function ``run.launch``. Kernels here need no scratch memory. So all arguments of that C function are the same each
    time, but for the stream and the kernel's. They are recorded once, from a call with a stand-in for the C function,
    which then is called directly. A launcher of another form is called as it is.
    """

    def as_it_is(stream: int, args: tuple) -> None:
        run(*grid, stream, function, metadata, None, None, None, *args)

    native = getattr(run, "launch", None)
    needs_scratch = getattr(run, "global_scratch_size", 0) or getattr(run, "profile_scratch_size", 0)
    if native is None or needs_scratch:
        return as_it_is
    given: list[Any] = []
    stream: Any = object()
    run.launch = lambda *all_given: given.extend(all_given)
    try:
        as_it_is(stream, args)
    finally:
        run.launch = native
    at = next((i for i, value in enumerate(given) if value is stream), None)
    if at is None:
        return as_it_is
    front, back = given[:at], given[at + 1 :]
    # The kernel's arguments are one tuple, or one by one. In the latter case the last one may be a tuple, too.
    if isinstance(back[-1], tuple) and len(back[-1]) == len(args) and all(map(operator.is_, back[-1], args)):
        *back, _ = back
        return lambda stream, args: native(*front, stream, *back, args)
    back = back[: len(back) - len(args)]
    return lambda stream, args: native(*front, stream, *back, *args)


def replace_launches(new: Callable) -> None:
    """Let ``new(kernel, *args, **options)`` be called where a compiled kernel would be launched."""
    triton.JITFunction.run = triton.JITFunction.__call__ = new


@functools.cache
def compiler_options() -> frozenset[str]:
    """The names of the options that the compilers for NVIDIA and AMD take at a launch."""
    nvidia = required("triton.backends.nvidia.compiler:CUDAOptions", _SIMULATES)
    amd = required("triton.backends.amd.compiler:HIPOptions", _SIMULATES)
    return frozenset(option.name for options in (nvidia, amd) for option in fields(options))
