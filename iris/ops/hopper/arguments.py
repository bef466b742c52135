"""What the kernels of this folder are launched with, and which calls they are for."""

from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from iris import simulator
from iris.heap.mapping import Mapping
from iris.heap.tensor_map import ELEMENTS, peers_map
from iris.language.target import architecture
from iris.ops.buffers import Buffers, Needs
from iris.ops.call import Call
from iris.ops.config import FusedConfig
from iris.ops.hopper.adder import SLOTS
from iris.ops.hopper.all_gather_matmul import hopper_all_gather_matmul
from iris.ops.hopper.matmul_all_gather import hopper_matmul_all_gather
from iris.ops.hopper.matmul_reduce import hopper_matmul_reduce
from iris.ops.hopper.pipeline import PANEL
from iris.ops.hopper.writer import STRIP
from iris.ops.kernel_arguments import Epilogue, Extents, HopperTiling, matrix

# TMA's: of addresses, and of strides but the last, which is 1 (CUDA driver API, cuTensorMapEncodeTiled).
ALIGNMENT = 16
# What the tensor cores multiply; fp8 on Hopper has these.
OPERANDS = ELEMENTS | {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}
# Elements of a tile at most: its sums are in registers, and those of fp8 twice (`iris.ops.hopper.pipeline.multiply`).
LARGEST_TILE, LARGEST_TILE_OF_FP8 = 128 * 256, 128 * 128
SHARED_MEMORY = 227 << 10
# In such pieces are products sent, and parts of sums fetched.
STRIP_SHAPE = [STRIP.value, PANEL.value]
# Chunks that a rank's rows of A are sent in, at most, and bytes of one, at least: what comes behind a copy costs time.
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


def problem(call: Call, config: FusedConfig, size: int) -> str | None:
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
    # A stage is free when the product behind it has begun.
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


def with_operands_that_fit(call: Call, size: int) -> Call:
    """The call, with copies of A and B where the kernels cannot use these as they lie.

    The copies are by rows; of a B of fp8, by columns.
    """
    a, b = call.a, call.b
    # Copy engines send whole rows. Of a matrix by columns TMA takes rows from multiples of 16 bytes on, where those of
    # each rank do not begin if their number is odd.
    in_pieces = call.name == "all_gather_matmul" and not a.is_contiguous()
    between = "reduce" in call.name and by_columns(a) and -(-len(a) // size) * a.itemsize % ALIGNMENT
    if a.itemsize == 1:
        # The tensor cores take both along K.
        a = a if not in_pieces and fits_tma(a) else by_rows(a)
        return call._replace(a=a, b=b if fits_tma(b.t()) else by_rows(b.t()).t())
    if in_pieces or between or not fits_tma(a.t() if by_columns(a) else a):
        a = by_rows(a)
    if not fits_tma(b.t() if by_columns(b) else b):
        b = by_rows(b)
    return call._replace(a=a, b=b)


def tensor_map(matrix: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """What TMA fetches tiles of the matrix, or of its transpose if that is by rows, with."""
    if by_columns(matrix):
        matrix, block = matrix.t(), block[::-1]
    layout = gl.NVMMASharedLayout.get_default_for(block, OPERANDS[matrix.dtype])
    return TensorDescriptor.from_tensor(matrix, block, layout)


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


def needs(kind: tuple, call: Call, config: FusedConfig, plan: Plan, size: int, direct: bool) -> Needs:
    """The workspace of a call, whose result peers store to where it is if ``direct``."""
    M, N = config.block_size_m, config.block_size_n
    (rows, depth), columns, dtype = call.a.shape, call.b.shape[1], call.out.dtype
    split = (2 * plan.last, plan.last * (plan.splits - 1) * M * N)
    kind = (*kind, plan)
    if call.name == "all_gather_matmul":
        chunks = -(-rows // chunk_rows(call.a, config))
        return Needs(kind, size * chunks, size * gathered_rows(call.a, config) * depth, call.a.dtype, *split)
    if call.name == "matmul_all_gather":
        return Needs(kind, 0, 0 if direct else size * rows * columns, dtype, *split, tickets=1)
    share = -(-rows // size)
    result = rows * columns if call.name == "matmul_all_reduce" and not direct else 0
    return Needs(kind, -(-share // M) * -(-columns // N), size * share * columns + result, dtype, tickets=2)


def tensors(
    call: Call,
    config: FusedConfig,
    plan: Plan,
    buffers: Buffers,
    size: int,
    memory: Mapping,
    memory_places: torch.Tensor,
    place: torch.Tensor,
    result: torch.Tensor,
) -> dict[str, Any]:
    """What a kernel takes that is the call's own.

    ``result`` lies in ``memory``, whose context is ``place``, if peers store it.
    """
    M, N, K = config.block_size_m, config.block_size_n, config.block_size_k
    (rows, depth), columns, rank = call.a.shape, call.b.shape[1], memory.rank
    scale_a, scale_b = [
        None if scale is None else scale.reshape(-1).contiguous() for scale in (call.scale_a, call.scale_b)
    ]
    given = {
        "tensor_map_a": tensor_map(call.a, [M // 2, K]),
        "tensor_map_b": tensor_map(call.b, [K, N]),
        "epilogue": Epilogue(call.bias, scale_a, scale_b),
        "TILING": HopperTiling(
            BLOCK_M=M,
            BLOCK_N=N,
            STAGES=stages(call, config),
            GROUP=config.group_size_m,
            TRANS_A=call.name != "all_gather_matmul" and by_columns(call.a),
            TRANS_B=by_columns(call.b),
            SCALE_A_PER_ROW=scale_a is not None and len(scale_a) > 1,
            SCALE_B_PER_COLUMN=scale_b is not None and len(scale_b) > 1,
            SPLIT=plan.splits > 1,
            ALL_REDUCE=call.name == "matmul_all_reduce",
            PACED=plan.paced and call.name == "matmul_all_gather",
        ),
    }
    if call.name == "all_gather_matmul":
        gathered = tensor_map(buffers.data.view(-1, depth), [M // 2, K])
        return {**given, "tensor_map_gathered": gathered, "out": matrix(result)}
    if call.name == "matmul_all_gather":
        peers = peers_map(memory, result[rank * rows : (rank + 1) * rows], STRIP_SHAPE)
        return {**given, "tensor_map_peers": peers, "places": memory_places}
    share = -(-rows // size)
    parts = buffers.data[: size * share * columns].view(size, share, columns)
    block = [1, *STRIP_SHAPE]
    own = TensorDescriptor.from_tensor(parts, block, gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[parts.dtype]))
    peers = peers_map(buffers.mapping, parts[rank], STRIP_SHAPE)
    return {**given, "tensor_map_parts": own, "tensor_map_peers": peers, "out": matrix(result), "out_context": place}


def kernel(call: Call, config: FusedConfig, plan: Plan, size: int) -> tuple[Any, dict[str, Any]]:
    """What carries calls of this kind, and the arguments that all of them have.

    The others are `tensors`, and those of `Buffers`.
    """
    (rows, depth), columns = call.a.shape, call.b.shape[1]
    if "reduce" in call.name:
        given: dict[str, Any] = {"M": rows, "share": -(-rows // size), "extents": Extents(columns, depth), "W": size}
        return hopper_matmul_reduce, given
    given = {"splits": plan.splits, "last": plan.last, "W": size}
    if call.name == "matmul_all_gather":
        return hopper_matmul_all_gather, given | {"M": rows, "N": columns, "K": depth}
    extents = Extents(columns, depth, chunk_rows(call.a, config))
    return hopper_all_gather_matmul, given | {"m": rows, "together": plan.together, "extents": extents}


def options(config: FusedConfig) -> dict[str, Any]:
    """Triton's. These are the warps of the first multiplier; the other roles have theirs besides."""
    return {"num_warps": 4}
