"""Errors of starting: what is installed, how a program is set up, and the making of a context."""

import sys

from iris.errors.base import IrisError
from iris.errors.wording import short_repr


class InvalidSettingError(IrisError, ValueError):
    """An environment variable of Iris has an invalid value."""

    def __init__(self, variable: str, value: str, possible: str) -> None:
        super().__init__(f"{variable}={short_repr(value)} is not valid: it takes {possible}.")


class SharedDeviceError(IrisError, RuntimeError):
    """Two ranks use the same GPU."""


class NoPeerAccessError(IrisError, RuntimeError):
    """A GPU cannot load from or store to the memory of another rank's GPU."""


class MappingError(IrisError, RuntimeError):
    """Memory could not be shared between the ranks."""


class InvalidHeapSizeError(IrisError, TypeError, ValueError):
    """A heap size that is negative, or not a whole number of bytes."""

    def __init__(self, size: object) -> None:
        super().__init__(
            f"heap_size={short_repr(size)} is not possible: it is a whole number of bytes, such as 1 << 30."
        )


class MismatchedHeapError(IrisError, ValueError):
    """The ranks asked for heaps of different sizes."""


class HeapTooLargeError(IrisError, MemoryError):
    """The heap is larger than the memory of the device, or than what is free of it."""


class WorkerNotImportableError(IrisError, TypeError):
    """New processes cannot import the function that they are to call."""

    def __init__(self, worker: object) -> None:
        super().__init__(
            f"Ranks are new processes, which import the function that they call, and cannot import {worker!r}. Define "
            "it at the top level of a file: a lambda, a function in another one, or one of a notebook, of `python -c` "
            "or of standard input will not do."
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


class TransformersMissingError(IrisError, ImportError):
    """The package transformers is not installed, or of a version that `iris.integrations.transformers` does not fit."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"iris.integrations.transformers needs transformers from 5.24 on, below 6 ({reason}): for this Python "
            f"({sys.executable}) run `pip install 'transformers>=5.24,<6'`."
        )
