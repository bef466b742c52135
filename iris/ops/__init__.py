"""`ctx.ops`: products of matrices whose communication is hidden behind the products; and the same as operators.

`grouped_mm` is a product alone, of groups of rows, as the experts of a layer need it.
"""

from iris.ops import functional
from iris.ops.config import FusedConfig
from iris.ops.grouped.launch import grouped_mm

__all__ = ["FusedConfig", "functional", "grouped_mm"]
