"""`iris.x`: tiles of matrices that any Triton kernel moves between ranks and adds up, while it computes others.

    tile = iris.x.Tile(pid_m, pid_n, BLOCK_M, BLOCK_N, accumulator)
    iris.x.all_gather(tile, iris.x.make_tensor_view(c, M, N, stride_m, stride_n), 0, ctx)

``ctx`` is an `iris.DeviceContext`. Matrices are of any shape; a tile's sizes are powers of two.
"""

from iris.x.algorithms import AllReduceConfig, all_reduce
from iris.x.atomic import all_reduce_atomic
from iris.x.moves import all_gather, all_to_all, gather
from iris.x.one_shot import all_reduce_one_shot, reduce_scatter
from iris.x.spinlock import all_reduce_spinlock
from iris.x.tile import TensorView, Tile, TileView, make_tensor_view
from iris.x.two_shot import all_reduce_two_shot

from iris.x import methods as methods  # isort: skip

__all__ = [
    "AllReduceConfig",
    "TensorView",
    "Tile",
    "TileView",
    "all_gather",
    "all_reduce",
    "all_reduce_atomic",
    "all_reduce_one_shot",
    "all_reduce_spinlock",
    "all_reduce_two_shot",
    "all_to_all",
    "gather",
    "make_tensor_view",
    "reduce_scatter",
]
