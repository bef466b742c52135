"""What the kernels of this folder are launched with: by the plan of least time, and with tensor maps of matrices."""

from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from iris.ccl.protocols import CollectivesContext
from iris.heap.tensor_map import peers_map, places
from iris.ops import choose
from iris.ops.buffers import Buffers, Needs
from iris.ops.call import GATHERS_COLUMNS, OPERATIONS, Call
from iris.ops.config import FusedConfig
from iris.ops.hopper import arguments as hopper
from iris.ops.hopper.all_gather_matmul import hopper_all_gather_matmul
from iris.ops.hopper.matmul_all_gather import hopper_matmul_all_gather
from iris.ops.hopper.matmul_reduce import hopper_matmul_reduce
from iris.ops.hopper.pipeline import PANEL
from iris.ops.hopper.sender import Sender
from iris.ops.hopper.writer import STRIP
from iris.ops.kernel import Kernels, Launch
from iris.ops.kernel_arguments import Epilogue, Extents, HopperTiling, matrix
from iris.runtime.launch import remember

# In such pieces are products sent, and parts of sums fetched.
STRIP_SHAPE = [STRIP.value, PANEL.value]


class HopperKernels(Kernels):
    """fp16, bf16 and fp8 in rows of whole 16 bytes."""

    name = "hopper"
    operations = tuple(name for name in OPERATIONS if name != GATHERS_COLUMNS)
    limit = staticmethod(hopper.problem)

    def __init__(self, context: CollectivesContext) -> None:
        super().__init__(context)
        self._plans: dict[tuple, hopper.Plan] = {}
        self._heap_places: torch.Tensor | None = None

    def plan(self, call: Call, config: FusedConfig) -> hopper.Plan:
        """How a kernel divides its tiles among programs, by time."""
        key = (call.name, call.a.shape, call.b.shape, call.a.dtype, config)
        chosen = self._plans.get(key)
        if chosen is None:
            size, programs, gpu = self._context.num_ranks, self.programs(config), choose.figures_for(self._context)
            chosen = choose.plan(call, size, programs, config, gpu) if gpu else hopper.Plan()
            remember(self._plans, key, chosen)
        return chosen

    def operands(self, call: Call) -> Call:
        # The copies are by rows; of a B of fp8, by columns.
        call = super().operands(call)
        a, b = call.a, call.b
        # Copy engines send whole rows. Of a matrix by columns TMA takes rows from multiples of 16 bytes on, where those
        # of each rank do not begin if their number is odd.
        in_pieces = call.name == "all_gather_matmul" and not a.is_contiguous()
        share = -(-len(a) // self._context.num_ranks)
        between = "reduce" in call.name and hopper.by_columns(a) and share * a.itemsize % hopper.ALIGNMENT
        if a.itemsize == 1:
            # The tensor cores take both along K.
            a = a if not in_pieces and hopper.fits_tma(a) else hopper.by_rows(a)
            return call._replace(a=a, b=b if hopper.fits_tma(b.t()) else hopper.by_rows(b.t()).t())
        if in_pieces or between or not hopper.fits_tma(a.t() if hopper.by_columns(a) else a):
            a = hopper.by_rows(a)
        if not hopper.fits_tma(b.t() if hopper.by_columns(b) else b):
            b = hopper.by_rows(b)
        return call._replace(a=a, b=b)

    def direct(self, call: Call) -> bool:
        # TMA stores what is gathered.
        return super().direct(call) and (call.name != "matmul_all_gather" or hopper.fits_tma(call.out))

    def needs(self, call: Call, config: FusedConfig) -> Needs:
        direct, plan, size = self.direct(call), self.plan(call, config), self._context.num_ranks
        kind = (*call.kind(config, direct), plan)
        M, N = config.block_size_m, config.block_size_n
        (rows, depth), columns, dtype = call.a.shape, call.b.shape[1], call.out.dtype
        split = (2 * plan.last, plan.last * (plan.splits - 1) * M * N)
        if call.name == "all_gather_matmul":
            chunks = -(-rows // hopper.chunk_rows(call.a, config))
            return Needs(kind, size * chunks, size * hopper.gathered_rows(call.a, config) * depth, call.a.dtype, *split)
        if call.name == "matmul_all_gather":
            return Needs(kind, 0, 0 if direct else size * rows * columns, dtype, *split, tickets=1)
        share = -(-rows // size)
        result = rows * columns if call.name == "matmul_all_reduce" and not direct else 0
        return Needs(kind, -(-share // M) * -(-columns // N), size * share * columns + result, dtype, tickets=2)

    def launch(self, call: Call, config: FusedConfig, buffers: Buffers) -> Launch:
        if call.name == "all_gather_matmul" and buffers.mover is None:
            (rows, depth), context = call.a.shape, self._context
            chunk, together = hopper.chunk_rows(call.a, config), self.plan(call, config).together
            buffers.mover = Sender(buffers, context.cur_rank, context.num_ranks, rows, depth, chunk, together)
        return super().launch(call, config, buffers)

    def tensors(
        self, call: Call, config: FusedConfig, buffers: Buffers, place: torch.Tensor, result: torch.Tensor
    ) -> dict[str, Any]:
        plan, rank, rows = self.plan(call, config), self._context.cur_rank, len(call.a)
        M, N, K = config.block_size_m, config.block_size_n, config.block_size_k
        scale_a, scale_b = [
            None if scale is None else scale.reshape(-1).contiguous() for scale in (call.scale_a, call.scale_b)
        ]
        given: dict[str, Any] = {
            "tensor_map_a": hopper.tensor_map(call.a, [M // 2, K]),
            "tensor_map_b": hopper.tensor_map(call.b, [K, N]),
            "epilogue": Epilogue(call.bias, scale_a, scale_b),
            "TILING": HopperTiling(
                BLOCK_M=M,
                BLOCK_N=N,
                STAGES=hopper.stages(call, config),
                GROUP=config.group_size_m,
                TRANS_A=call.name != "all_gather_matmul" and hopper.by_columns(call.a),
                TRANS_B=hopper.by_columns(call.b),
                SCALE_A_PER_ROW=scale_a is not None and len(scale_a) > 1,
                SCALE_B_PER_COLUMN=scale_b is not None and len(scale_b) > 1,
                SPLIT=plan.splits > 1,
                ALL_REDUCE=call.name == "matmul_all_reduce",
                PACED=plan.paced and call.name == "matmul_all_gather",
            ),
        }
        if call.name == "all_gather_matmul":
            return {**given, **self._maps(call, config, buffers, result), "out": matrix(result)}
        if call.name == "matmul_all_gather":
            if result is not call.out:
                return {**given, **self._maps(call, config, buffers, result), "places": buffers.places}
            peers = peers_map(self._context.heap.mapping, result[rank * rows : (rank + 1) * rows], STRIP_SHAPE)
            return {**given, "tensor_map_peers": peers, "places": self._places()}
        return {**given, **self._maps(call, config, buffers, result), "out": matrix(result), "out_context": place}

    def _maps(self, call: Call, config: FusedConfig, buffers: Buffers, result: torch.Tensor) -> dict[str, Any]:
        """The tensor maps of the workspace, made with its first call: all of its calls have the same extents.

        ``result``: where it is in the workspace, if it is there.
        """
        if not buffers.maps:
            size, rank = self._context.num_ranks, self._context.cur_rank
            (rows, depth), columns = call.a.shape, call.b.shape[1]
            if call.name == "all_gather_matmul":
                block = [config.block_size_m // 2, config.block_size_k]
                buffers.maps = {"tensor_map_gathered": hopper.tensor_map(buffers.data.view(-1, depth), block)}
            elif call.name == "matmul_all_gather":
                mine = result[rank * rows : (rank + 1) * rows]
                buffers.maps = {"tensor_map_peers": peers_map(buffers.mapping, mine, STRIP_SHAPE)}
            else:
                share = -(-rows // size)
                parts = buffers.data[: size * share * columns].view(size, share, columns)
                block = [1, *STRIP_SHAPE]
                layout = hopper.layout(parts.dtype, *block)
                buffers.maps = {
                    "tensor_map_parts": TensorDescriptor.from_tensor(parts, block, layout),
                    "tensor_map_peers": peers_map(buffers.mapping, parts[rank], STRIP_SHAPE),
                }
        return buffers.maps

    def kernel(self, call: Call, config: FusedConfig) -> tuple[Any, int, dict[str, Any]]:
        plan, programs, size = self.plan(call, config), self.programs(config), self._context.num_ranks
        (rows, depth), columns = call.a.shape, call.b.shape[1]
        given: dict[str, Any] = {"W": size}
        if "reduce" in call.name:
            given |= {"M": rows, "share": -(-rows // size), "extents": Extents(columns, depth)}
            return hopper_matmul_reduce, programs, given
        given |= {"splits": plan.splits, "last": plan.last}
        if call.name == "matmul_all_gather":
            return hopper_matmul_all_gather, programs, given | {"M": rows, "N": columns, "K": depth}
        extents = Extents(columns, depth, hopper.chunk_rows(call.a, config))
        return hopper_all_gather_matmul, programs, given | {"m": rows, "together": plan.together, "extents": extents}

    @staticmethod
    def options(config: FusedConfig) -> dict[str, Any]:
        """These are the warps of the first multiplier; the other roles have theirs besides."""
        return {"num_warps": 4}

    def _places(self) -> torch.Tensor:
        """Where the heap of each rank is in a tensor map of all."""
        if self._heap_places is None:
            self._heap_places = places(self._context.heap.mapping)
        return self._heap_places
