"""The launch of a collective's kernel: its arguments by their names, and the registers that it leaves to others.

Programs wait for peers. Of two launches on two streams, rank 0 may have begun the one and rank 1 the other. If the two
could not be resident together, both ranks would wait for ever. So every launch leaves room for a launch of another
stream. What a program takes of a multiprocessor is mostly registers (CUDA C++ Programming Guide, "Compute
Capabilities": 65536 a multiprocessor), so the room is counted in registers:

* A kernel that takes at most 5/16 of them begins early (programmatic dependent launch), and lets the next launch of its
  stream begin early while it waits.
* Any other kernel takes at most half, and begins when the one before it has ended; but a norm between two ranks begins
  early if it takes at most 3/8 (`iris.ops.row_division`). Such a norm lets the next launch begin when none of its
  programs waits for a peer any more (`gdc_launch_dependents_after_waits`): what is left of it ends by itself.
* A kernel with queues (`iris.ccl.queue`) takes up to three quarters, and may begin early. It runs on fewer
  multiprocessors than there are, and leaves the others free (`Communicator.programs` says why that is enough).

So what a stream holds while it waits for peers is half, or of a kernel of the first kind and the launch after it 5/16 +
3/8 = 11/16. Say that each of two ranks runs a launch that waits for the other rank, and that they are of two streams.
If one of them takes at most 5/16, it finds room on the other rank, where the other stream holds at most 11/16. If both
take more, the other stream holds half at most on either rank, and there is room for both. (Registers belong to four
partitions, so not all programs may fit at once. Those of pushes do not wait for each other, and follow one another.)

Products and other kernels that compute on all multiprocessors keep to none of this: the page "Fused operations" says,
under "Streams", that their stream and those of calls that wait for peers have to follow each other.
"""

from typing import Any

import torch

from iris import simulator
from iris.ccl.call import Call
from iris.ccl.communicator import Communicator, Launch
from iris.heap import describe_address
from iris.language.target import on_nvidia, threads_per_warp
from iris.runtime.launch import addresses, prepare, registers

ALL_REGISTERS = 65536
# Of a launch at most that lets the next one begin while it waits, and of one that begins early.
SMALL_LAUNCH, EARLY_LAUNCH = ALL_REGISTERS * 5 // 16, ALL_REGISTERS * 3 // 8
# Through queues programs take most of a multiprocessor each, but there are fewer of them than multiprocessors
# (`Communicator.programs`). The rest is for the small launches of other streams. Registers belong to four partitions,
# and a warp to one of them: 16 warps leave 4096 of the 16384 in each, for a warp of 128 a thread, which is what
# `iris.ops.row_division.CLUSTER_REGISTERS` counts on.
MOST_REGISTERS = 49152

# By the bytes of an element: the type that a kernel moves data as where it does not look at their values.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def kernel_launch(
    call: Call, kernel: Any, programs: int, num_warps: int, dtype: torch.dtype, **arguments: object
) -> Launch:
    """A launch of ``kernel``, or of its Gluon version, for tensors that lie like those of ``call``.

    The kernel has the parameters ``input``, ``output``, and one for each tensor of `Call.more`, in this order. They are
    given anew with each launch. Input and output are taken for memory of ``dtype``, and their addresses are divisible
    by 16 where these are. The other parameters are the ``arguments``, by name, but two: ``factors`` is None where the
    call has none, and ``EARLY``, the last one, says whether the kernel lets the next launch of its stream begin.
    """
    comm, given = call.comm, (call.input, call.output, *call.more)
    kernel = kernel.gluon if call.config.use_gluon else kernel
    names = list(kernel.arg_names)
    first = names.index("input")
    if "factors" in names and not call.more:
        arguments["factors"] = None
    admits = names[-1] == "EARLY"
    last = names[first + len(given) : -1 if admits else None]
    before = tuple(arguments.pop(name) for name in names[:first])
    after = tuple(arguments.pop(name) for name in last)
    if arguments:
        raise TypeError(f"{kernel.fn.__name__}() has no parameters {', '.join(arguments)}.")

    def with_tensors(x: torch.Tensor, y: torch.Tensor, *more: torch.Tensor) -> tuple:
        return *before, as_words(x, dtype), as_words(y, dtype), *more, *after

    # No fused multiply-add: where the compiler fuses differs between algorithms, and so would the bits.
    options: dict[str, Any] = {"enable_fp_fusion": False} if "factors" in names and call.more else {}
    early = True
    if admits:
        early, limits = _share(comm, kernel, programs, num_warps, with_tensors(*given), options)
        options |= limits
        after = (*after, early)
    elif on_nvidia():
        options |= leaving_room(num_warps * threads_per_warp())
    launch = prepare(kernel, (programs, 1, 1), *with_tensors(*given), early=early, num_warps=num_warps, **options)
    if simulator.ACTIVE:

        def run(stream: int | None, x: torch.Tensor, y: torch.Tensor, *more: torch.Tensor) -> None:
            launch(stream, with_tensors(x, y, *more))
            # It is over, and so what has gone wrong in it is known.
            comm.abort_flag.raise_recorded(describe_address)

        return run
    front = addresses(before)

    def enqueue(stream: int | None, x: torch.Tensor, y: torch.Tensor, *more: torch.Tensor) -> None:
        launch(stream, (*front, x.data_ptr(), y.data_ptr(), *more, *after))

    enqueue.keeps_alive = before  # type: ignore[attr-defined]
    return enqueue


def fitting(comm: Communicator, programs: int, num_warps: int) -> int:
    """How many of ``programs`` fit in half of all registers, at 64 registers a thread."""
    if simulator.ACTIVE or not on_nvidia():
        return programs
    return max(1, min(programs, ALL_REGISTERS // 2 // (64 * threads_per_warp()) * comm.num_sms // num_warps))


def leaving_room(threads: int) -> dict[str, int]:
    """Options by which a program of so many threads, with parts of many ranks too, holds `MOST_REGISTERS` at most."""
    registers = MOST_REGISTERS // threads
    # 255 is the hardware's limit for a thread.
    return {"maxnreg": registers} if registers < 255 else {}


def _share(
    comm: Communicator, kernel: Any, programs: int, num_warps: int, args: tuple, compiling: dict[str, Any]
) -> tuple[bool, dict[str, int]]:
    """Whether ``kernel(*args, EARLY)`` may let the next one begin while it waits, as it holds 5/16 of the registers.

    Otherwise also the options that limit it to half of them.
    """
    if simulator.ACTIVE or not on_nvidia():
        return True, {}
    threads = -(-programs // comm.num_sms) * num_warps * threads_per_warp()
    for early, limit in ((True, SMALL_LAUNCH), (False, ALL_REGISTERS // 2)):
        held = registers(kernel, (programs, 1, 1), *args, early, early=early, num_warps=num_warps, **compiling)
        # A warp gets them for its threads by eights.
        if threads * (-(-held // 8) * 8) <= limit:
            return early, {}
    return False, {"maxnreg": ALL_REGISTERS // 2 // threads // 8 * 8}


def as_words(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One element of ``dtype`` where ``tensor`` begins: what a kernel needs to know of it."""
    if tensor.dtype == dtype:
        return tensor
    if not tensor.numel():  # nothing is read or written
        return torch.empty(1, dtype=dtype, device=tensor.device)
    begin = tensor.storage_offset() * tensor.itemsize
    first = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return first.set_(tensor.untyped_storage(), begin, (dtype.itemsize,), (1,)).view(dtype)
