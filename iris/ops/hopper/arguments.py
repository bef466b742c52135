"""Which calls the kernels of this folder are for, and the figures of their launches that the choice depends on."""

import copy
import functools
from typing import NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from iris import simulator
from iris.heap.tensor_map import ELEMENTS
from iris.language.target import architecture
from iris.ops.call import Call
from iris.ops.config import FusedConfig
from iris.ops.hopper.adder import SLOTS
from iris.ops.hopper.pipeline import PANEL
from iris.ops.hopper.writer import STRIP
from iris.runtime.launch import remember

# TMA's: of addresses, and of strides but the last, which is 1 (CUDA driver API, cuTensorMapEncodeTiled).
ALIGNMENT = 16
# What the tensor cores multiply; fp8 on Hopper has these.
OPERANDS = ELEMENTS | {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}
# Elements of a tile at most: its sums are in registers, and those of fp8 twice (`iris.ops.hopper.pipeline.multiply`).
LARGEST_TILE, LARGEST_TILE_OF_FP8 = 128 * 256, 128 * 128
SHARED_MEMORY = 227 << 10
# Chunks that a rank's rows of A are sent in, at most, and bytes of one, at least: what comes after a copy costs time.
# And rows: for each chunk all of B is read, which takes longer than to multiply 128 rows by it.
MOST_CHUNKS, LEAST_CHUNK_BYTES, LEAST_CHUNK_ROWS = 4, 8 << 20, 256


class Plan(NamedTuple):
    """What of a launch is chosen by time, beside its configuration.

    The ``last`` tiles are cut into ``splits`` along K; stores to peers are ``paced``. Of a gathered A, so many chunks
    of a rank's rows go ``together`` where they are not the last (`iris.ops.hopper.all_gather_matmul`).
    """

    splits: int = 1
    last: int = 0
    paced: bool = False
    together: int = 1


def is_hopper() -> bool:
    """Whether kernels run on Hopper, or in the simulator."""
    return simulator.ACTIVE or architecture() == 90


def problem(call: Call, config: FusedConfig) -> str | None:
    """Why the kernels are not for this call, if they are not: the same on all ranks, whatever their strides are."""
    if not is_hopper():
        return "the Gluon kernels are for GPUs of compute capability 9.0"
    narrow = call.a.itemsize == 1
    if call.a.dtype not in OPERANDS or call.out.dtype not in ELEMENTS or not narrow and call.out.dtype != call.a.dtype:
        return "the Gluon kernels are for A, B and out of one dtype, fp16 or bf16, or for A and B of fp8"
    if not call.a.shape[1]:
        return "A has no columns"
    if call.a.shape[1] * call.a.itemsize % ALIGNMENT or call.b.shape[1] * call.out.itemsize % ALIGNMENT:
        return f"the rows of A and of the result need a multiple of {ALIGNMENT} bytes"
    if config.block_size_m not in (128, 256) or config.block_size_n not in (64, 128, 256):
        return "the Gluon kernels have tiles of 128 or 256 rows, and 64, 128 or 256 columns"
    most = LARGEST_TILE_OF_FP8 if narrow else LARGEST_TILE
    if config.block_size_m * config.block_size_n > most:
        return f"the Gluon kernels have tiles of {most} elements at most, of {call.a.dtype}"
    # The tensor cores take 32 bytes of each row at a time.
    if config.block_size_k * call.a.itemsize < 32:
        return f"block_size_k={config.block_size_k} is less than a product takes; {32 // call.a.itemsize} is the least"
    # A stage is free when the product after it has begun.
    if stages(call, config) < 2:
        return f"block_size_k={config.block_size_k} leaves no room for two tiles of A and B; 64 does"
    return None


def fits_tma(matrix: torch.Tensor) -> bool:
    """Whether TMA can access the matrix by rows."""
    steps = matrix.stride(0) * matrix.itemsize, matrix.data_ptr()
    return matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1] and not any(step % ALIGNMENT for step in steps)


def by_columns(matrix: torch.Tensor) -> bool:
    """Whether the matrix lies in memory as its transpose does by rows."""
    return matrix.stride(1) != 1 and matrix.stride(0) == 1


def by_rows(matrix: torch.Tensor) -> torch.Tensor:
    """A copy of the matrix, by rows."""
    return matrix.clone(memory_format=torch.contiguous_format)


# Descriptors without their matrix, by its extents and the tile: to make one, with all that Triton checks of it, takes
# the host as long as a launch.
_maps: dict[tuple, TensorDescriptor] = {}


def tensor_map(matrix: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """What TMA fetches tiles of the matrix, or of its transpose if that is by rows, with. It `fits_tma`."""
    if by_columns(matrix):
        matrix, block = matrix.t(), block[::-1]
    key = (matrix.shape, matrix.stride(), matrix.dtype, *block)
    known = _maps.get(key)
    if known is None:
        made = TensorDescriptor.from_tensor(matrix, block, layout(matrix.dtype, *block))
        known = copy.copy(made)
        known.base = None
        remember(_maps, key, known)
        return made
    made = copy.copy(known)
    made.base = matrix
    return made


@functools.cache
def layout(dtype: torch.dtype, *block: int) -> gl.NVMMASharedLayout:
    """Of a tile in shared memory, as TMA leaves it."""
    return gl.NVMMASharedLayout.get_default_for(list(block), OPERANDS[dtype])


def stages(call: Call, config: FusedConfig) -> int:
    """As many as fit beside the products, and the parts of sums."""
    M, N, K = config.block_size_m, config.block_size_n, config.block_size_k
    landing = 2 * SLOTS.value * STRIP.value * PANEL.value if "reduce" in call.name else 0
    return min(8, (SHARED_MEMORY - 1024 - 2 * M * N - landing) // (call.a.itemsize * K * (M + N)))


def chunk_rows(a: torch.Tensor, config: FusedConfig) -> int:
    """Rows of A that are sent together: a multiple of a tile's."""
    chunks = max(1, min(MOST_CHUNKS, a.nbytes // LEAST_CHUNK_BYTES, len(a) // LEAST_CHUNK_ROWS))
    return max(1, -(-len(a) // (chunks * config.block_size_m))) * config.block_size_m


def gathered_rows(a: torch.Tensor, config: FusedConfig) -> int:
    """Rows that each rank's part of a gathered A has room for: whole chunks."""
    chunk = chunk_rows(a, config)
    return -(-len(a) // chunk) * chunk
