"""Which transformers `iris.integrations.transformers` can extend, checked before anything of it is imported."""

import importlib.metadata

from iris.errors import TransformersMissingError

# The first with `EPImplementationInterface`, and the first in which its interface may be another one.
OLDEST, TOO_NEW = (5, 24), (6,)


def check() -> None:
    """Raise `TransformersMissingError` unless there is a version that offers what is registered there."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise TransformersMissingError("it is not installed") from None
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not OLDEST <= numbers < TOO_NEW:
        raise TransformersMissingError(f"version {version} is installed")
