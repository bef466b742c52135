"""Finding a private part of torch or Triton by its path, ``module:name``, and saying so where it is gone.

The purpose completes the sentence "... has no <part>, which Iris needs to <purpose>".
"""

from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Any, NoReturn

from iris.errors import MissingPartError

# The releases whose private parts are known here, and what the packages call themselves.
KNOWN = {"torch": ("torch", "2.9 to 2.13"), "triton": ("Triton", "3.6 to 3.9")}


def missing(path: str, purpose: str) -> MissingPartError:
    """The error that says that this part is gone."""
    package = path.replace(":", ".").partition(".")[0]
    name, known = KNOWN[package]
    return MissingPartError(
        f"{name} {import_module(package).__version__} has no {path.replace(':', '.')}, which Iris needs to {purpose}. "
        f"Iris knows {name} {known}: install one of these, or a newer Iris."
    )


def _find(path: str) -> Any:
    # As `pkgutil.resolve_name` does of "module:names", but sooner: operators look for some parts at each call.
    module, _, names = path.partition(":")
    return attrgetter(names)(import_module(module))


def required(path: str, purpose: str) -> Any:
    """The part. Raises `MissingPartError` if it is gone."""
    try:
        return _find(path)
    except (ImportError, AttributeError) as error:
        raise missing(path, purpose) from error


def optional(path: str) -> Any | None:
    """The part, or None if it is gone."""
    try:
        return _find(path)
    except (ImportError, AttributeError):
        return None


def function(path: str, purpose: str) -> Callable[..., Any]:
    """The function itself, so that a call costs no more; if it is gone, one that raises `MissingPartError`."""
    found = optional(path)
    if found is not None:
        return found

    def raise_missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise missing(path, purpose)

    return raise_missing


def late(path: str, purpose: str) -> Callable[..., Any]:
    """A function that looks for the part at each call, for modules that take long to import."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return required(path, purpose)(*args, **kwargs)

    return call


def member(value: Any, path: str, purpose: str) -> Any:
    """The attribute of ``value`` that ``path`` ends with. Raises `MissingPartError` if ``value`` has none."""
    try:
        return getattr(value, path.rpartition(".")[2])
    except AttributeError as error:
        raise missing(path, purpose) from error
