"""``python -m iris demo``: ranks exchange data from inside kernels, and a newcomer sees what moves between whom."""

from iris.demo.show import run

__all__ = ["run"]
