"""`ctx.ops`: products of matrices whose communication is hidden behind the products; and the same as operators."""

from iris.ops import functional
from iris.ops.config import FusedConfig

__all__ = ["FusedConfig", "functional"]
