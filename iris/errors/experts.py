"""Errors of expert parallelism."""

from iris.errors.base import IrisError


class InvalidExpertsError(IrisError, ValueError):
    """Sizes, tensors or expert numbers that ``ctx.experts`` or its calls cannot do anything with."""


class ReceivedUsedUpError(IrisError, RuntimeError):
    """What a dispatch returned is used again, after a combine or its release has ended it."""

    def __init__(self, call: str, how: str) -> None:
        super().__init__(
            f"{call}() was given what a dispatch had returned and {how} has ended: others may be in its memory by now. "
            "Each dispatch is combined once; dispatch again."
        )


class TooManyInFlightError(IrisError, RuntimeError):
    """There are as many results of dispatches in use as ``ExpertsConfig.in_flight`` says."""

    def __init__(self, in_flight: int, pending: list[str]) -> None:
        """``pending``: calls that were not waited for."""
        super().__init__(
            f"dispatch() has no memory left: {in_flight} results of earlier ones are in use, for which "
            f"ExpertsConfig(in_flight={in_flight}) sets memory aside. Combine or release() one of them first, or set "
            "aside more."
            + (f" Nobody has called wait() of {' and '.join(pending)}, with async_op=True." if pending else "")
        )


class PendingCallError(IrisError, RuntimeError):
    """A call with ``async_op=True`` is waited for twice, or never, or with half of it in a graph."""
