"""Launching a kernel of the library's own, at the cost of the driver's call and not of the JIT's argument handling."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from iris import simulator
from iris.compat import triton_jit
from iris.compat.cuda import current_raw_stream
from iris.cuda_graphs.capture import relaxed
from iris.language.target import launches_early

# Launches, or what leads to them, that each cache holds at most.
LAUNCH_CACHE_SIZE = 4096
# CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
CARVEOUT = 9


def prepare(
    kernel: Any, grid: tuple[int, int, int], *args: Any, cluster: int = 1, early: bool = True, **options: int
) -> Callable[..., None]:
    """Compile and load ``kernel`` for ``args`` now; the result, called with a stream's handle and args, launches it.

    The host neither synchronises nor compiles in the launches themselves. They may have other arguments for which the
    JIT makes the same code: numbers of the same divisibility by 16; for a tensor another of the same dtype whose
    address has the same divisibility, or that address as a number; for a tuple, one with such fields. Whoever launches
    keeps the memory at an address alive. In the simulator, which has no streams, the handle is None, and tensors stay
    tensors.

    Where the GPU can, a launch begins while the one before it on the stream ends, so the kernel waits before it touches
    memory: `gdc_wait` of `iris.language.dependent_launch`. ``early``: False for a launch that must not, since it
    would take places that another stream's needs (`iris.ccl.kernel_launch`). ``options``: ``num_warps`` and others of
    Triton's.

    ``cluster``: so many programs that follow each other run at the same time and reach each other's shared memory. To
    Triton each is one of its own: with its ``num_ctas`` it would divide one program's blocks among them.
    """
    if grid[0] % cluster:
        raise ValueError(f"{grid[0]} programs are not clusters of {cluster}.")
    if simulator.ACTIVE:
        return lambda stream, args: kernel[grid](*args, **options)
    loaded = _load(kernel, grid, args, early, options)
    metadata = loaded.metadata
    if cluster > 1:
        _divide_memory(loaded.function)
        grid, metadata = (grid[0] // cluster, *grid[1:]), triton_jit.as_cluster(metadata, cluster)
    return triton_jit.launcher(loaded.run, grid, loaded.function, metadata, args)


def _divide_memory(function: int) -> None:
    """Have a multiprocessor's memory divided into 32 KiB of shared memory, and L1 cache, for what ``function`` runs.

    A program begins only where shared memory is as large as its kernel prefers: by the driver's choice, as much as all
    programs of its kind take that a multiprocessor could run. A multiprocessor on which kernels without shared memory
    run has 32 KiB of it, where a small program with some would wait for their end (CUDA Driver API,
    "cuFuncSetAttribute": PREFERRED_SHARED_MEMORY_CARVEOUT, in percent, for which the next larger size is taken; seen in
    `tests/ops/test_room.py`).
    """
    memory = torch.cuda.get_device_properties().shared_memory_per_multiprocessor
    error = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), CARVEOUT, 100 * 32768 // memory)
    if error:
        raise RuntimeError(f"The driver could not divide a multiprocessor's memory ({error}).")


def registers(kernel: Any, grid: tuple[int, int, int], *args: Any, early: bool = True, **options: int) -> int:
    """How many registers a thread has in a launch for which `prepare` is given the same; on a GPU."""
    return _load(kernel, grid, args, early, options).registers


def _load(
    kernel: Any, grid: tuple[int, int, int], args: tuple, early: bool, options: dict[str, int]
) -> triton_jit.Loaded:
    if early and launches_early():
        options = options | {"launch_pdl": True}
    with relaxed():
        return triton_jit.load(kernel, grid, args, options)


def remember(known: dict, key: Any, value: Any) -> None:
    """Keep ``value`` for later calls. A full cache is emptied, as in a program whose shapes always change."""
    if len(known) == LAUNCH_CACHE_SIZE:
        known.clear()
    known[key] = value


def addresses(args: tuple) -> tuple:
    """The arguments with an address in the place of each tensor, so that no launch asks what memory it points to.

    Of tuples, too. In the simulator the tensors themselves. The caller keeps them alive.
    """
    if simulator.ACTIVE:
        return args
    return tuple([_address(x) for x in args])


def _address(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if isinstance(argument, tuple):
        # Triton's launchers read the fields of a tuple in their order, whatever its type.
        return tuple([_address(x) for x in argument])
    return argument


# What `enqueue` launches kernels with, by their kinds of calls.
_prepared: dict[tuple, Callable[..., None]] = {}


def enqueue(
    kernel: Any,
    grid: tuple[int, int, int],
    device: int | None,
    *args: Any,
    num_warps: int = 4,
    only_prepare: bool = False,
) -> None:
    """Launch a kernel on the current stream of a device, prepared by the first call of its kind; or only prepare it.

    A kind has one grid, one dtype of each tensor, addresses that are all multiples of 16 or not, and the same numbers,
    but for those that the kernel does not specialise (``do_not_specialize`` of `triton.jit`): they may change from call
    to call. ``device``: its number, None in the simulator.
    """
    changing = getattr(kernel, "do_not_specialize", None) or ()
    specialized = [
        None if name in changing else specialization_of(each) for name, each in zip(kernel.arg_names, args, strict=True)
    ]
    key = (id(kernel), grid, device, num_warps, *specialized)
    run = _prepared.get(key)
    if run is None:
        run = prepare(kernel, grid, *args, num_warps=num_warps)
        remember(_prepared, key, run)
    if not only_prepare:
        run(None if device is None else current_raw_stream(device), addresses(args))


def specialization_of(argument: Any) -> Any:
    """What a prepared launch is specialised for: a tensor's dtype and its address modulo 16, a number's value.

    Of a tensor map, dtype and block. Of a tuple, this of each field.
    """
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if isinstance(argument, tuple):
        return tuple([specialization_of(field) for field in argument])
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, *argument.block_shape
    return argument
