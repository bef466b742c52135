"""Errors of the symmetric heap and its tensors."""

from iris.errors.base import IrisError
from iris.errors.wording import short_repr


class HeapClosedError(IrisError, RuntimeError):
    """The heap was used after `close()`."""


class HeapOutOfMemoryError(IrisError, MemoryError):
    """No block of the heap is large enough, also after everything that died on every rank was taken back.

    Says what was asked for, what is free, and the largest block.
    """


class NotSymmetricError(IrisError, ValueError):
    """A tensor that is not on the symmetric heap was given where one on it is needed.

    Also: a kernel reaches a peer through such a pointer, which the simulator notices, and a GPU with ``IRIS_DEBUG=1``.
    """

    @classmethod
    def of_pointer(cls, happened: str) -> "NotSymmetricError":
        """The error of a kernel's pointer. ``happened``: a sentence that says what the pointer points to."""
        return cls(
            f"{happened} It has to be in this rank's own heap: pass tensors that the kernel's context has made, by "
            "ctx.zeros(), ctx.as_symmetric(), ... The operation finds the peer's copy itself; what ctx.peer() and "
            "translate() give is a peer's already, for accesses that name no rank."
        )


class NotATensorError(IrisError, TypeError):
    """Something else was given where a torch tensor is needed."""

    def __init__(self, value: object, needed: str = "A torch.Tensor is needed") -> None:
        super().__init__(f"{needed}, and this is a {type(value).__name__}: {short_repr(value)}.")


class NotAStreamError(IrisError, TypeError):
    """Something else was given to the host's barrier as a stream, for example the flags of a barrier in a kernel."""

    def __init__(self, value: object) -> None:
        given = f"a tensor of shape {list(value.shape)}" if hasattr(value, "shape") else f"{short_repr(value)}"
        super().__init__(
            f"The barrier of the host takes a torch.cuda.Stream whose work it waits for, or nothing, and got {given}. "
            "A process group is given by name, as group=…. Flags are for the barrier of the device context, inside a "
            "kernel."
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
