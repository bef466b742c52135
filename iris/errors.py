"""What can go wrong, one class a mistake.

Every message says what happened, on which rank where that matters, what was given, and what to do. Each class derives
from `IrisError` and from the built-in error that a caller would expect, so both ``except IrisError`` and
``except MemoryError`` do what they say.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence


def readable(size: int) -> str:
    """A number of bytes for a message: ``1.5 GiB``, with all digits beside it where rounding hides some."""
    power = min(max(size.bit_length() - 1, 0) // 10, 4)
    if power == 0:
        return f"{size} bytes"
    scaled = size / (1 << 10 * power)
    text = f"{scaled:.4g} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
    return text if float(f"{scaled:.4g}") == scaled else f"{text} ({size} bytes)"


def names(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 and 3``, ``ranks 0, 1 and 3``."""
    *most, last = [str(rank) for rank in ranks]
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


class IrisError(Exception):
    """Base of every error that Iris raises on purpose."""


class IrisTimeoutError(IrisError, TimeoutError):
    """A wait in a kernel, a meeting of ranks, or an allocation that waits for memory took longer than its limit.

    The message names who waits for what, and who has arrived.
    """


class InvalidSettingError(IrisError, ValueError):
    """An environment variable of Iris has an invalid value."""

    def __init__(self, variable: str, value: str, possible: str) -> None:
        super().__init__(f"{variable}={value!r} is not valid: it takes {possible}.")


class UnknownChoiceError(IrisError, ValueError):
    """An argument that takes one of a few values got another."""

    def __init__(self, name: str, value: object, possible: Iterable[object]) -> None:
        super().__init__(f"{name}={value!r} is not possible; it takes one of {', '.join(map(repr, possible))}.")


class InvalidCountError(IrisError, ValueError):
    """An argument that counts something is no such number: less than one event, repetition or rank."""

    def __init__(self, name: str, value: object, what: str, least: int = 1) -> None:
        super().__init__(f"{name}={value!r:.60} is not possible: it is a number of {what}, {least} or more.")


class InvalidArgumentError(IrisError, TypeError):
    """An argument has a type that the call does not take, such as a size of floats, or one is missing or too many."""


class InvalidValueError(IrisError, RuntimeError, ValueError):
    """An argument has a value that the call cannot do anything with, such as a range without an end."""


class ChannelsExhaustedError(IrisError, RuntimeError):
    """A group has no memory left for the flags and staging of another kind of call, stream or line of graphs."""

    def __init__(self, wanted: str, size: str, channels: int, lines: int) -> None:
        super().__init__(
            f"The {size} that this group may have for flags and staging are in use by {channels} channels, and another "
            f"needs {wanted}. Each operation has one a stream, and one for all graphs of a pool or of a capture stream "
            f"({lines} of these so far), which they keep. Use fewer streams, capture on one stream what never runs at "
            "once, or give back the channels of graphs that are gone with ctx.ccl.release_graphs()."
        )


class TooManyStreamsError(IrisError, RuntimeError):
    """Messages from one rank to another are on more than two streams, for which there is staging."""


class FolderError(IrisError, OSError):
    """A folder or a file that is needed cannot be used; the message says which, what for, and why."""


class NotTracingError(IrisError, RuntimeError):
    """Events were asked for, but ``ctx.tracing.enable()`` was not called."""

    def __init__(self) -> None:
        super().__init__(
            "Nothing is being recorded. Call ctx.tracing.enable() on all ranks before the kernels, and initialise "
            "their device contexts with tracing=True."
        )


class OutOfStepError(IrisError, RuntimeError):
    """Ranks met at different points of the program: one is in one collective call, another in a different one."""


class MismatchedSettingsError(IrisError, RuntimeError):
    """An environment variable that decides what ranks do together is not the same on all ranks.

    These are ``IRIS_SIMULATOR``, ``IRIS_DEBUG``, ``IRIS_SANITIZE`` and ``IRIS_TRACE``.
    """

    def __init__(self, variable: str, ranks: Mapping[str, Sequence[int]]) -> None:
        found = "; ".join(f"{value} on {names(those)}" for value, those in ranks.items())
        super().__init__(
            f"The ranks differ in {variable}: {found}. Give all ranks the same environment: it decides what they do "
            "together."
        )


class PeerFailedError(IrisError, RuntimeError):
    """A collective step failed on another rank, so it was undone here too. Has the other rank's message."""


class PeerLostError(IrisError, ConnectionError):
    """A rank has died, or its program has ended, while others wait for it on the host.

    In the simulator also while they wait in a kernel. Or the process that holds the process group's store has ended.
    """


class InvalidMessageError(IrisError, RuntimeError):
    """What lies in the process group's store for a rank is no message of this version of Iris.

    Ranks run different versions, or somebody else writes there.
    """


class GroupAbortedError(IrisError, RuntimeError):
    """A broken group was used again: a wait was given up, a call interrupted, or messages were of unequal size."""

    def __init__(self, ranks: Iterable[int], why: str) -> None:
        super().__init__(
            f"The group of ranks {list(ranks)} is broken, as an aborted communicator is: its ranks are out of step, so "
            f"results would be wrong. The cause: {why}\nOther groups go on. To go on with these ranks, close the "
            "context on all of them and make a new one with iris.iris(); or make a new process group, if this is one."
        )


class ProcessUnreachableError(IrisError, ConnectionError):
    """A process that was to say what it is doing cannot be asked: ``python -m iris info --pid``.

    There is no such process, it is another user's, it has made no context, or it does not answer.
    """


class SeveralHostsError(IrisError, RuntimeError):
    """The ranks are on several hosts; Iris reaches memory by loads and stores, which end at the host."""


class SharedDeviceError(IrisError, RuntimeError):
    """Two ranks use the same GPU."""


class NoPeerAccessError(IrisError, RuntimeError):
    """A GPU cannot load from or store to the memory of another rank's GPU."""


class RankOutOfRangeError(IrisError, ValueError):
    """A host call, or a kernel in the simulator, named a rank that the group does not have."""

    def __init__(self, rank: object, size: int) -> None:
        super().__init__(
            f"There is no rank {rank!r}: the group has {size}, so a rank is a whole number from 0 to {size - 1}."
        )


class InvalidGroupError(IrisError, ValueError):
    """Something that is no process group, or one that this rank is not a member of, or whose GPUs differ."""


class MappingError(IrisError, RuntimeError):
    """Memory could not be shared between the ranks."""


class InvalidHeapSizeError(IrisError, TypeError, ValueError):
    """A heap size that is negative, or not a whole number of bytes."""

    def __init__(self, size: object) -> None:
        super().__init__(f"heap_size={size!r} is not possible: it is a whole number of bytes, such as 1 << 30.")


class MismatchedHeapError(IrisError, ValueError):
    """The ranks asked for heaps of different sizes."""


class HeapTooLargeError(IrisError, MemoryError):
    """The heap is larger than the memory of the device, or than what is free of it."""


class HeapClosedError(IrisError, RuntimeError):
    """The heap was used after `close()`."""


class HeapOutOfMemoryError(IrisError, MemoryError):
    """No block of the heap is large enough, also after everything that died on every rank was taken back.

    Says what was asked for, what is free, and the largest block.
    """


class AsymmetricHeapError(IrisError, RuntimeError):
    """The ranks did not make the same allocations in the same order, so offsets no longer agree."""


class NotSymmetricError(IrisError, ValueError):
    """A tensor that is not on the symmetric heap was given where one on it is needed.

    Also: a kernel in the simulator reaches a peer through such a pointer.
    """


class NotATensorError(IrisError, TypeError):
    """Something else was given where a torch tensor is needed."""

    def __init__(self, value: object, needed: str = "A torch.Tensor is needed") -> None:
        super().__init__(f"{needed}, and this is a {type(value).__name__}: {value!r:.60}.")


class NotAStreamError(IrisError, TypeError):
    """Something else was given to the host's barrier as a stream, for example the flags of a barrier in a kernel."""

    def __init__(self, value: object) -> None:
        given = f"a tensor of shape {list(value.shape)}" if hasattr(value, "shape") else f"{value!r:.60}"
        super().__init__(
            f"The barrier of the host takes a torch.cuda.Stream whose work it waits for, or nothing, and got {given}. "
            "Flags are for the barrier of the device context, inside a kernel."
        )


class NotPicklableError(IrisError, TypeError):
    """A context was to be sent to another process, or saved. (``copy.deepcopy`` of one returns the context itself.)"""

    def __init__(self) -> None:
        super().__init__(
            "A context is of this process, whose ranks and memory it knows, and cannot be pickled. Make one in each "
            "process, with iris.iris(); of a module that holds one, save the state_dict()."
        )


class FreedTensorError(IrisError, RuntimeError):
    """The memory of the tensor was given back with `free()` before."""


class InvalidShapeError(IrisError, RuntimeError):
    """A size is negative."""


class InvalidDtypeError(IrisError, TypeError):
    """Something that is no dtype was given as one."""


class InvalidLayoutError(IrisError, ValueError):
    """A layout or memory format that the heap does not have: its tensors are strided and contiguous."""


class WrongDeviceError(IrisError, RuntimeError):
    """A tensor or a ``device`` argument is not on the heap's device."""


class InvalidOutputError(IrisError, RuntimeError):
    """An ``out=`` tensor with the wrong size or dtype, or not on the heap."""


class KernelDefinedTooEarlyError(IrisError, RuntimeError):
    """A kernel was compiled for a GPU by its decorator, before Iris switched the simulator on."""

    def __init__(self, kernel: str, place: str) -> None:
        super().__init__(
            f"Kernel {kernel!r} ({place}) was defined before Iris was imported, so the simulator, which is active in "
            f"this process, cannot run it. Import iris before the module that defines it, or set IRIS_SIMULATOR=0."
        )


class KernelSourceMissingError(IrisError, ValueError):
    """The simulator cannot read the source of a kernel, and no compiler could."""

    def __init__(self, kernel: str, place: str) -> None:
        super().__init__(
            f"The source of kernel {kernel!r} ({place}) cannot be read, or is another one by now. Triton works on the "
            "text of a kernel, on a GPU as in the simulator: define it in a file that is there while the program runs, "
            "or in a notebook, not with exec(), with `python -c`, at Python's prompt or in a .pyc file without its .py."
        )


class InvalidContextError(IrisError, ValueError):
    """A kernel got a device context, or heap bases, of no open heap."""


class WorkerNotImportableError(IrisError, TypeError):
    """New processes cannot import the function that they are to call."""

    def __init__(self, worker: object) -> None:
        super().__init__(
            f"Ranks are new processes, which import the function that they call, and cannot import {worker!r}. Define "
            "it at the top level of a file: a lambda, a function in another one, or one of a notebook, of `python -c` "
            "or of standard input will not do."
        )


class LaunchError(IrisError, TypeError):
    """A kernel was called or launched in a way that no GPU would take."""


class SharedMemoryRaceError(IrisError, RuntimeError):
    """Two accesses to the shared memory of a program, of which one writes, that nothing orders.

    They are those of its partitions, or of a copy or product that it has issued. Under the sanitizer it is a finding.
    """


class KernelBoundsError(IrisError, IndexError, ValueError):
    """A kernel used a place outside of its shared memory, or had TMA store in front of a tensor."""


class MbarrierError(IrisError, RuntimeError):
    """An mbarrier was used before ``init`` or after ``invalidate``, or got more arrivals than it counts."""


class UnclearedMemoryError(IrisError, RuntimeError):
    """Words that carry their own arrival were sent to memory that nobody had cleared."""


class NotInSimulatorError(IrisError, NotImplementedError):
    """A kernel used an operation that the simulator does not have."""

    def __init__(self, operation: str) -> None:
        super().__init__(
            f"{operation} is not available in the simulator. Guard it: `if not SIMULATED: ...` with "
            f"SIMULATED = tl.constexpr(iris.simulator.ACTIVE), or run the kernel on a GPU."
        )


class NotOnCpuError(IrisError, ValueError):
    """A kernel in the simulator got a tensor that a CPU cannot reach."""

    def __init__(self, kernel: str, argument: str, device: object) -> None:
        super().__init__(
            f"Argument {argument!r} of kernel {kernel!r} is on {device}, and the simulator runs kernels on the CPU. "
            f"Pass a CPU tensor (Iris makes its tensors there when the simulator is active), or set IRIS_SIMULATOR=0."
        )


class TritonMissingError(IrisError, ImportError):
    """Triton is not installed, or cannot be imported."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"Iris needs Triton 3.6 or newer ({reason}). Triton exists for Linux on x86-64 and aarch64: there, run "
            f"`pip install 'triton>=3.6'` for this Python ({sys.executable}). On Windows use WSL 2, on macOS a Linux "
            f"container. No GPU is needed: without one, kernels run in the simulator."
        )


class MissingPartError(IrisError, ImportError):
    """This release of torch or Triton lacks a part that Iris needs and that their documentation does not promise.

    The message names it, and the releases that have it.
    """


class NoGpuForRankError(IrisError, RuntimeError):
    """There are fewer GPUs than ranks, and ``IRIS_SIMULATOR=0`` forbids the simulator."""


class FirstUseInCaptureError(IrisError, RuntimeError):
    """The first use of an operation by a group, or the making of a context, was inside the capture of a CUDA graph.

    Of collectives, ``device_barrier``, calls of a group of ``torch.distributed``, and fused operations of a shape or
    their preamble. The capture can be ended, and another one begun.
    """

    def __init__(self, call: str) -> None:
        super().__init__(
            f"The first {call} of a group compiles a kernel and meets the other ranks on the host, which a CUDA graph "
            "cannot hold. Call it once before the capture."
        )


class NotTheCallerError(IrisError, ValueError):
    """A functional device operation got a peer's rank where it takes the caller's.

    Or the caller of ``copy`` is neither of its two ranks.
    """


class InvalidTileError(IrisError, TypeError):
    """An operation of `iris.x` got something else where it takes a tile, a view of a matrix, locks or the context.

    On a GPU, Triton's ``CompilationError`` says the same.
    """


class ForeignLockValueError(IrisError, RuntimeError):
    """A lock of an operation of `iris.x` holds what no signal leaves there: the caller has written it.

    Raised on every rank. On a GPU, the next ``barrier()`` or ``close()`` raises it.
    """

    def __init__(self, rank: int, owner: int, place: str | None, value: int) -> None:
        super().__init__(
            f"Rank {rank}: an operation of iris.x left a tile out, since the lock at {place or 'an unknown place'} "
            f"holds {value:#x} on rank {owner}, which no operation of iris.x has put there. Signals may be lost, so "
            "results are not valid. Write nothing to locks: the operation itself tells the other ranks that its tile "
            "is there, so take out what older programs do before the call, tl.atomic_xchg(locks + tile, 1). Then zero "
            "the locks on all ranks, and meet in a barrier. Each src has locks of its own, and so has "
            "all_reduce_spinlock."
        )


class InvalidConfigError(IrisError, ValueError):
    """A field of `iris.ccl.Config` or `iris.ops.FusedConfig` has a value that cannot work."""


class InvalidCollectiveError(IrisError, ValueError):
    """The tensors of a collective do not fit together, or not the group."""


class UnsupportedReductionError(IrisError, TypeError):
    """A reduction has no meaning for a dtype, or is not one of Iris'."""


class WorkspaceTooSmallError(IrisError, ValueError):
    """A workspace that was given to a collective was prepared for something smaller, or something else."""


class MismatchedCollectiveError(IrisError, RuntimeError):
    """Ranks call a collective or a fused operation with different arguments, or with a result elsewhere on the heap.

    Found with ``IRIS_DEBUG=1``.
    """


class InvalidTableError(IrisError, ValueError):
    """A table of what was measured, by which operations are chosen, is missing, broken, or differs between ranks."""
