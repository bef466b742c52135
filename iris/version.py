"""The version of this library: of the package, of `python -m iris info`, and of the changelog."""

__version__ = "0.1.0"
