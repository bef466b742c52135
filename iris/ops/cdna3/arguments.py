"""What the kernels of this folder are launched with, and which calls they are for."""

from typing import Any

import torch

from iris import simulator
from iris.language.target import architecture
from iris.ops.buffers import Buffers
from iris.ops.call import GATHERS_COLUMNS, OPERATIONS, Call
from iris.ops.cdna3.all_gather_matmul import cdna3_all_gather_matmul
from iris.ops.cdna3.matmul_all_gather import cdna3_matmul_all_gather
from iris.ops.cdna3.matmul_reduce import cdna3_matmul_reduce
from iris.ops.cdna3.product import VECTOR, WARPS
from iris.ops.config import FusedConfig
from iris.ops.kernel import Kernels
from iris.ops.kernel_arguments import Cdna3Tiling, matrix

TARGETS = ("gfx942", "gfx950")
SHARED_MEMORY = 64 << 10
# Strides up to here: offsets in a tile, of 256 lines and a depth of 128 at most, have 31 bits, in bytes.
LARGEST_STRIDE = (1 << 30) // (256 + 128)
LANES = 64 * WARPS.value


class Cdna3Kernels(Kernels):
    """fp16 and bf16 of any layout, without scales."""

    name = "cdna3"
    operations = tuple(name for name in OPERATIONS if name != GATHERS_COLUMNS)

    def limit(self, call: Call, config: FusedConfig) -> str | None:
        if not simulator.ACTIVE and architecture() not in TARGETS:
            return f"on AMD the Gluon kernels are for {' and '.join(TARGETS)}"
        if call.a.dtype not in (torch.float16, torch.bfloat16) or call.out.dtype != call.a.dtype or call.scaled:
            return "the Gluon kernels are for A, B and out of one dtype, fp16 or bf16, and no scales"
        if not call.a.shape[1]:
            return "A has no columns"
        if max(call.a.shape[1], call.b.shape[1]) > LARGEST_STRIDE:
            return f"the Gluon kernels are for matrices of up to {LARGEST_STRIDE} columns"
        M, N, K = config.block_size_m, config.block_size_n, config.block_size_k
        if M not in (64, 128, 256) or N not in (64, 128, 256) or K not in (32, 64, 128):
            return "the Gluon kernels have tiles of 64, 128 or 256 rows and columns, and a depth of 32, 64 or 128"
        if (M + N) * K * 2 > SHARED_MEMORY:
            return f"tiles of A and B have {SHARED_MEMORY >> 10} KiB of shared memory; block_size_k=64 fits all"
        if min(M, N) * K < LANES * VECTOR:
            return f"each of {LANES} threads loads {VECTOR} elements at least of a tile of A and of B; 64 x 64 will do"
        return None

    def operands(self, call: Call) -> Call:
        # Matrices whose lines lie too far apart for the kernels' offsets are copied. And a gathered A has rows without
        # gaps, as those of the peers have that came.
        call = super().operands(call)
        a, b = (
            matrix if max(matrix.stride()) <= LARGEST_STRIDE else matrix.clone(memory_format=torch.contiguous_format)
            for matrix in (call.a, call.b)
        )
        return call._replace(a=a.contiguous() if call.name == "all_gather_matmul" else a, b=b)

    def tensors(
        self, call: Call, config: FusedConfig, buffers: Buffers, place: torch.Tensor, result: torch.Tensor
    ) -> dict[str, Any]:
        given = {"b": matrix(call.b), "bias": call.bias, "out": matrix(result)}
        if call.name == "all_gather_matmul":
            # Without gaps between its rows.
            given["a"] = call.a
        else:
            given |= {"a": matrix(call.a), "out_context": place}
        return given

    def kernel(self, call: Call, config: FusedConfig) -> tuple[Any, int, dict[str, Any]]:
        programs, size = self.programs(config), self._context.num_ranks
        (M, K), N = call.a.shape, call.b.shape[1]
        tiling = Cdna3Tiling(
            BLOCK_M=config.block_size_m,
            BLOCK_N=config.block_size_n,
            BLOCK_K=config.block_size_k,
            GROUP=config.group_size_m,
            XCDS=config.num_xcds,
            CHUNK=config.chunk_size,
            BY_LINES_A=call.a.stride(1) == 1,
            BY_LINES_B=call.b.stride(0) == 1,
        )
        given = {"N": N, "K": K, "W": size, "TILING": tiling}
        if call.name == "all_gather_matmul":
            senders = config.senders(programs, size)
            given |= {"m": M, "SENDERS": senders, "TILING": tiling._replace(BY_LINES_A=True)}
            return cdna3_all_gather_matmul, max(programs, senders + 1), given
        given["M"] = M
        if call.name == "matmul_all_gather":
            return cdna3_matmul_all_gather, programs, given
        given |= {"share": -(-M // size), "ALL_REDUCE": call.name == "matmul_all_reduce"}
        return cdna3_matmul_reduce, programs, given

    @staticmethod
    def options(config: FusedConfig) -> dict[str, Any]:
        """A program of these kernels has as many warps as their layouts are made for."""
        return {"num_warps": WARPS.value}
