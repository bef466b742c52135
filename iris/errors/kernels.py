"""Errors of kernels, which the simulator finds; on GPUs some of them."""

from iris.errors.base import IrisError


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


class LaunchError(IrisError, TypeError):
    """A kernel was called or launched in a way that no GPU would take."""


class SharedMemoryRaceError(IrisError, RuntimeError):
    """Two accesses to the shared memory of a program, of which one writes, that nothing orders.

    They are those of its partitions, or of a copy or product that it has issued. Under the sanitizer it is a finding.
    """


class KernelBoundsError(IrisError, IndexError, ValueError):
    """A kernel used a place outside of its shared memory, or had TMA store to a place before a tensor.

    Or it gave a barrier fewer flags than its programs and ranks need.
    """


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
