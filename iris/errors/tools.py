"""Errors of tracing, of commands and of the files that they use."""

from iris.errors.base import IrisError


class FolderError(IrisError, OSError):
    """A folder or a file that is needed cannot be used; the message says which, what for, and why."""


class NotTracingError(IrisError, RuntimeError):
    """Events were asked for, but ``ctx.tracing.enable()`` was not called."""

    def __init__(self) -> None:
        super().__init__(
            "Nothing is being recorded. Call ctx.tracing.enable() on all ranks before the kernels, and initialise "
            "their device contexts with tracing=True."
        )


class ProcessUnreachableError(IrisError, ConnectionError):
    """A process that was to say what it is doing cannot be asked: ``python -m iris info --pid``.

    There is no such process, it is another user's, it has made no context, or it does not answer.
    """
