"""The kernels in Triton, for every platform: what they are launched with."""

from typing import Any

import torch

from iris.ops.all_gather_matmul import all_gather_matmul
from iris.ops.all_gather_matmul_k import all_gather_matmul_k
from iris.ops.buffers import Buffers
from iris.ops.call import GATHERS_A, GATHERS_ROWS, Call
from iris.ops.config import FusedConfig
from iris.ops.kernel import Kernels
from iris.ops.kernel_arguments import Epilogue, Matrix, Sending, Tiling, matrix
from iris.ops.matmul_all_gather import matmul_all_gather
from iris.ops.matmul_reduce import matmul_reduce

# Rows and columns of A that a program of all_gather_matmul sends at a time: 32 KiB of bfloat16.
SEND_M, SEND_K = 16, 1024


class TritonKernels(Kernels):
    """Every operation, of all dtypes, layouts and sizes."""

    name = "triton"

    def operands(self, call: Call) -> Call:
        # Rows that are gathered are sent, and multiplied, as they lie.
        call = super().operands(call)
        if call.name in GATHERS_A and call.a.stride(1) != 1:
            return call._replace(a=call.a.contiguous())
        return call

    def tensors(
        self, call: Call, config: FusedConfig, buffers: Buffers, place: torch.Tensor, result: torch.Tensor
    ) -> dict[str, Any]:
        gathers = call.name in GATHERS_A
        given: dict[str, Any] = {
            # A that is gathered lies by rows; but of one column the stride may be any.
            "a": Matrix(call.a, call.a.stride(0), 1) if gathers else matrix(call.a),
            "b": matrix(call.b),
            "epilogue": Epilogue(call.bias, *call.scales()),
            "out": matrix(result),
        }
        if not gathers:
            given["out_context"] = place
        return given

    def kernel(self, call: Call, config: FusedConfig) -> tuple[Any, int, dict[str, Any]]:
        programs, size = self.programs(config), self._context.num_ranks
        (M, K), N = call.a.shape, call.b.shape[1]
        # What a tile of a wider type has less of, so that as many fit. A product of fp8 takes 32 at least.
        depth = max(32 if call.a.itemsize == 1 else 16, config.block_size_k * 2 // max(2, call.a.itemsize))
        tiling = Tiling(
            BLOCK_M=config.block_size_m,
            BLOCK_N=config.block_size_n,
            BLOCK_K=depth,
            GROUP=config.group_size_m,
            # Who takes tiles for a chiplet is a program on it.
            XCDS=min(config.num_xcds, programs),
            CHUNK=config.chunk_size,
            CACHE_A=config.cache_modifier_a or "",
            CACHE_B=config.cache_modifier_b or "",
            ALLOW_TF32=config.allow_tf32,
        )
        given = {"N": N, "K": K, "W": size, "TILING": tiling}
        if call.name in GATHERS_A:
            own_tiles = -(-M // config.block_size_m) * -(-N // config.block_size_n)
            sending = Sending(config.senders(programs, size, programs - own_tiles), SEND_M, SEND_K)
            carrier = all_gather_matmul if call.name == GATHERS_ROWS else all_gather_matmul_k
            return carrier, programs, given | {"m": M, "SENDING": sending}
        if call.name == "matmul_all_gather":
            return matmul_all_gather, programs, given | {"M": M}
        given |= {"M": M, "share": -(-M // size), "ALL_REDUCE": call.name == "matmul_all_reduce"}
        return matmul_reduce, programs, given

    @staticmethod
    def options(config: FusedConfig) -> dict[str, Any]:
        """Two stages of the default tiles are what a program has shared memory for on MI300: 64 KiB."""
        stages = config.num_stages or (2 if torch.version.hip else 3)
        return {"num_warps": config.num_warps, "num_stages": stages}
