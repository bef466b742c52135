"""Finds a private part of torch or Triton by its path, ``module:name``. The error for a missing one says its purpose.

``purpose`` completes the sentence "... has no <part>, which Iris needs to <purpose>". Which function to take:

* `required` where Iris cannot be used without the part;
* `optional` where there is another way;
* `function`, `late` and `member` where only calls that need the part should fail.
"""

from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Any, NoReturn

from iris.errors import MissingPartError

# By package: its name for people, and the releases in which its private parts have been checked.
KNOWN = {"torch": ("torch", "2.9 to 2.13"), "triton": ("Triton", "3.6 to 3.9")}


def missing(path: str, purpose: str) -> MissingPartError:
    """The error that this part is missing."""
    package = path.replace(":", ".").partition(".")[0]
    name, known = KNOWN[package]
    return MissingPartError(
        f"{name} {import_module(package).__version__} has no {path.replace(':', '.')}, which Iris needs to {purpose}. "
        f"Iris knows {name} {known}: install one of these, or a newer Iris."
    )


def _find(path: str) -> Any:
    # As `pkgutil.resolve_name`, but faster: operators look for some parts at each call.
    module, _, names = path.partition(":")
    return attrgetter(names)(import_module(module))


def required(path: str, purpose: str) -> Any:
    """The part. Raises `MissingPartError` if it is missing."""
    try:
        return _find(path)
    except (ImportError, AttributeError) as error:
        raise missing(path, purpose) from error


def optional(path: str) -> Any | None:
    """The part, or None if it is missing."""
    try:
        return _find(path)
    except (ImportError, AttributeError):
        return None


def function(path: str, purpose: str) -> Callable[..., Any]:
    """The part, a function. If it is missing, a function that raises `MissingPartError` when it is called."""
    found = optional(path)
    if found is not None:
        return found

    def raise_missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise missing(path, purpose)

    return raise_missing


def late(path: str, purpose: str) -> Callable[..., Any]:
    """A function that finds the part at each call and calls it. For modules that take long to import."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return required(path, purpose)(*args, **kwargs)

    return call


def member(value: Any, path: str, purpose: str) -> Any:
    """The attribute of ``value`` that ``path`` ends with. Raises `MissingPartError` if ``value`` has none."""
    try:
        return getattr(value, path.rpartition(".")[2])
    except AttributeError as error:
        raise missing(path, purpose) from error
