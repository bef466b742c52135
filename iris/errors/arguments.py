"""Errors of any call whose arguments are wrong."""

from collections.abc import Iterable

from iris.errors.base import IrisError
from iris.errors.wording import short_repr


class UnknownChoiceError(IrisError, ValueError):
    """An argument that takes one of a few values got another."""

    def __init__(self, name: str, value: object, possible: Iterable[object]) -> None:
        super().__init__(
            f"{name}={short_repr(value)} is not possible; it takes one of {', '.join(map(repr, possible))}."
        )


class InvalidCountError(IrisError, ValueError):
    """An argument that counts something is no such number: less than one event, repetition or rank."""

    def __init__(self, name: str, value: object, what: str, least: int = 1) -> None:
        super().__init__(f"{name}={short_repr(value)} is not possible: it is a number of {what}, {least} or more.")


class InvalidArgumentError(IrisError, TypeError):
    """An argument has a type that the call does not take, such as a size of floats, or one is missing or too many."""


class InvalidValueError(IrisError, RuntimeError, ValueError):
    """An argument has a value that the call cannot do anything with, such as a range without an end."""
