"""Tiles of a matrix: where one is, and where its elements lie."""

import triton
import triton.language as tl

from iris.errors import InvalidTileError, UnknownChoiceError
from iris.language.jit import triton_aggregate as aggregate


@aggregate
class Tile:
    """Rows ``pid_m * block_m`` on and columns ``pid_n * block_n`` on of a matrix, with their values.

    ``block_m``, ``block_n``: constants, powers of two. ``data``: a block ``[block_m, block_n]``. The last tiles of a
    matrix may reach over its edge; what they hold there is not used.
    """

    pid_m: tl.tensor | tl.constexpr
    pid_n: tl.tensor | tl.constexpr
    block_m: tl.constexpr
    block_n: tl.constexpr
    data: tl.tensor

    @triton.constexpr_function
    def __init__(self, pid_m, pid_n, block_m, block_n, data):
        self.pid_m, self.pid_n = kept(pid_m), kept(pid_n)
        self.block_m, self.block_n = tl.constexpr(block_m), tl.constexpr(block_n)
        self.data = data


@aggregate
class TileView:
    """The place of a `Tile`, without values: for what is in memory already."""

    pid_m: tl.tensor | tl.constexpr
    pid_n: tl.tensor | tl.constexpr
    block_m: tl.constexpr
    block_n: tl.constexpr

    @triton.constexpr_function
    def __init__(self, pid_m, pid_n, block_m, block_n):
        self.pid_m, self.pid_n = kept(pid_m), kept(pid_n)
        self.block_m, self.block_n = tl.constexpr(block_m), tl.constexpr(block_n)


# Whether the tile brings its values.
Tile.HOLDS_DATA = tl.constexpr(True)
TileView.HOLDS_DATA = tl.constexpr(False)


@aggregate
class TensorView:
    """A matrix ``[M, N]`` in memory, whose rows and columns are ``stride_m`` and ``stride_n`` elements apart."""

    ptr: tl.tensor
    M: tl.tensor | tl.constexpr
    N: tl.tensor | tl.constexpr
    stride_m: tl.tensor | tl.constexpr
    stride_n: tl.tensor | tl.constexpr

    @triton.constexpr_function
    def __init__(self, ptr, M, N, stride_m, stride_n):
        self.ptr = ptr
        self.M, self.N = kept(M), kept(N)
        # A stride of 1 is a constant to Triton, and has to stay one for accesses of 16 bytes.
        self.stride_m, self.stride_n = kept(stride_m), kept(stride_n)

    @triton.jit
    def at(self, rows, columns):
        """Pointers to these elements: ``rows`` and ``columns`` are blocks that broadcast against each other."""
        # 64 bits: a matrix may have more than 2^31 elements.
        return self.ptr + (rows.to(tl.int64) * self.stride_m + columns.to(tl.int64) * self.stride_n)

    @triton.jit
    def number_of(self, tile):
        """The tile's number among all tiles of this size, row by row: its place in an array of locks."""
        return tile.pid_m * tl.cdiv(self.N, tile.block_n) + tile.pid_n


@triton.constexpr_function
def kept(value):
    """Triton unwraps the constants among a constexpr_function's arguments; they are to stay constants."""
    return value if isinstance(value, tl.tensor) else tl.constexpr(value)


@triton.constexpr_function
def check(name, ctx, tile, holds_data, **views):
    """Raise unless these are what the operation ``name`` takes; ``holds_data``: whether its tile has to."""
    if not hasattr(ctx, "num_ranks"):
        raise InvalidTileError(
            f"{name}() takes the context that iris.DeviceContext.initialize(context_tensor, rank, num_ranks) makes, "
            f"and got {describe(ctx)}."
        )
    if not hasattr(tile, "pid_m") or (holds_data and not tile.HOLDS_DATA):
        wanted = "Tile(pid_m, pid_n, block_m, block_n, data)"
        if not holds_data:
            wanted += " or TileView(pid_m, pid_n, block_m, block_n)"
        raise InvalidTileError(f"{name}() takes iris.x.{wanted}, and got {describe(tile)}.")
    for role, view in views.items():
        if not hasattr(view, "at"):
            wanted = "make_tensor_view(ptr, M, N, stride_m, stride_n)"
            raise InvalidTileError(f"{name}() takes {role} as iris.x.{wanted}, and got {describe(view)}.")


@triton.constexpr_function
def check_locks(name, locks):
    """Raise unless these are the locks of the operation ``name``."""
    if not isinstance(locks, tl.tensor) or getattr(locks.dtype, "element_ty", None) not in (tl.int32, tl.int64):
        raise InvalidTileError(
            f"{name}() takes locks as a pointer to int32 or int64 on the heap, one for each tile and zeros at first, "
            f"and got {describe(locks)}."
        )


@triton.constexpr_function
def check_choice(name, value, *possible):
    """Raise unless the argument ``name`` has one of the ``possible`` values."""
    if value not in possible:
        raise UnknownChoiceError(name, value, possible)


@triton.constexpr_function
def describe(value):
    """What a caller gave, for errors."""
    if isinstance(value, TileView):
        return "a TileView, which has no data"
    if isinstance(value, tl.tensor):
        return f"a pointer to {value.dtype.element_ty}" if value.dtype.is_ptr() else f"a tensor of {value.dtype}"
    return "None" if value is None else f"a {type(value).__name__}"


@triton.jit
def make_tensor_view(ptr, M, N, stride_m, stride_n):
    """The matrix ``[M, N]`` at ``ptr``; strides in elements."""
    return TensorView(ptr, M, N, stride_m=stride_m, stride_n=stride_n)


@triton.jit
def rows_of(tile):
    """The tile's rows, ``[block_m, 1]``."""
    return (tile.pid_m * tile.block_m + tl.arange(0, tile.block_m))[:, None]


@triton.jit
def columns_of(tile):
    """The tile's columns, ``[1, block_n]``."""
    return (tile.pid_n * tile.block_n + tl.arange(0, tile.block_n))[None, :]
