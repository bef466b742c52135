"""`ctx.ops`: products of matrices whose communication is hidden behind the products."""

from iris.ops.config import FusedConfig

__all__ = ["FusedConfig"]
