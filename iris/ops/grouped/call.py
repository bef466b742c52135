"""What one grouped GEMM is given, and whether it fits together."""

from typing import NamedTuple

import torch

from iris import simulator
from iris.errors import InvalidCollectiveError, InvalidConfigError, InvalidValueError, UnknownChoiceError, short_repr
from iris.heap.history import debugging
from iris.ops.call import FNUZ, NARROW, WIDE, check_devices, described, overlap
from iris.ops.config import FusedConfig
from iris.ops.grouped.kernel_arguments import SCALE_BLOCK, GroupedForm, GroupedMatrix, GroupedRows, groups_up_to
from iris.ops.grouped.stages import Progress

NAME = "grouped_mm"
ACTIVATIONS = (None, "silu_and_mul")
NUMBERS = (torch.int32, torch.int64)
# Groups at most: each program has the ends of all of them in its registers.
MOST_GROUPS = 1024
# Their numbers are of 32 bits, also past the last tile.
MOST_ROWS = (1 << 31) - 4096
DEBUGGING = debugging()


class GroupedCall(NamedTuple):
    """``mat_a``: ``[rows, K]``, or expanded ``[E, capacity, K]``; ``mat_b``: ``[E, K, N]``; ``out``: as A, by columns.

    See `iris.ops.grouped_mm`.
    """

    out: torch.Tensor
    mat_a: torch.Tensor
    mat_b: torch.Tensor
    offs: torch.Tensor | None
    counts: torch.Tensor | None
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    activation: str | None = None
    progress: Progress | None = None
    """Of the kernel for Hopper alone: what it tells the next one on the stream, which begins beside it."""

    @property
    def expanded(self) -> bool:
        return self.mat_a.dim() == 3

    @property
    def gated(self) -> bool:
        return self.activation is not None

    @property
    def blocked(self) -> bool:
        """Whether a scale is one of `SCALE_BLOCK` columns of A."""
        return self._a_by_blocks or self._b_by_blocks

    @property
    def room(self) -> int:
        """The rows of the matrix that a group is in."""
        return self.mat_a.shape[-2]

    @property
    def columns(self) -> int:
        """Those of the result."""
        return self.mat_b.shape[-1] // (2 if self.gated else 1)

    @property
    def rows_per_group(self) -> int:
        """As many on average at most, for all that the host knows."""
        return self.room if self.expanded else -(-self.room // max(1, len(self.mat_b)))

    @property
    def _a_by_blocks(self) -> bool:
        return self.scale_a is not None and self.scale_a.dim() == self.mat_a.dim()

    @property
    def _b_by_blocks(self) -> bool:
        return self.scale_b is not None and self.scale_b.dim() == 3

    def given(self) -> dict[str, torch.Tensor]:
        """The tensors by their roles."""
        given = {"out": self.out, "mat_a": self.mat_a, "mat_b": self.mat_b}
        may_be_given = {"offs": self.offs, "counts": self.counts, "scale_a": self.scale_a, "scale_b": self.scale_b}
        return given | {role: tensor for role, tensor in may_be_given.items() if tensor is not None}

    def form(self) -> GroupedForm:
        groups, together = groups_up_to(len(self.mat_b)), SCALE_BLOCK if self._b_by_blocks else 1
        return GroupedForm(groups, self.gated, self.blocked, together)

    def groups(self) -> GroupedRows:
        return GroupedRows(*(None if each is None else each.contiguous() for each in (self.offs, self.counts)))

    def factors(self) -> tuple[GroupedMatrix, GroupedMatrix]:
        """The scales of A and of B, with strides of 0 for what shares one."""
        a, b = self.scale_a, self.scale_b
        of_a = of_b = GroupedMatrix(None, 0, 0, 0)
        if a is not None:
            strides = a.stride() if self._a_by_blocks else (*a.stride(), 0)
            of_a = GroupedMatrix(a, *strides) if self.expanded else GroupedMatrix(a, 0, *strides)
        if b is not None:
            of_b = GroupedMatrix(b, *b.stride(), *(0,) * (3 - b.dim()))
        return of_a, of_b

    def check(self, config: FusedConfig | None) -> None:
        """Raise unless this can be computed."""
        if config is not None and not isinstance(config, FusedConfig):
            raise InvalidConfigError(
                f"config={short_repr(config)} is not possible: it is an iris.ops.FusedConfig, or None."
            )
        if self.activation is not None and not (isinstance(self.activation, str) and self.activation in ACTIVATIONS):
            raise UnknownChoiceError("activation", self.activation, ACTIVATIONS)
        check_devices(NAME, self.given(), self.mat_a.device)
        problem = self._problem()
        if problem:
            raise InvalidCollectiveError(f"{NAME}() with {described(self.given())}: {problem}.")
        capturing = self.mat_a.is_cuda and torch.cuda.is_current_stream_capturing()
        if simulator.ACTIVE or DEBUGGING and not capturing:
            self._check_numbers()

    def _problem(self) -> str | None:
        """What is wrong, in words."""
        out, a, b = self.out, self.mat_a, self.mat_b
        if a.dim() not in (2, 3) or b.dim() != 3:
            return "mat_a is [rows, K] or [E, capacity, K], and mat_b [E, K, N]"
        if a.dtype != b.dtype or a.dtype not in NARROW + WIDE or out.dtype not in WIDE:
            return "mat_a and mat_b have one dtype, fp8, fp16, bf16 or fp32, and out is fp16, bf16 or fp32"
        if a.dtype in FNUZ and a.is_cuda and not torch.version.hip:
            return f"{a.dtype} is for AMD's CDNA3"
        E, K, N = b.shape
        if a.shape[-1] != K:
            transposed = "; of weights [E, N, K] give weight.transpose(1, 2)" if a.shape[-1] == N else ""
            return f"mat_b needs as many rows as mat_a has columns, {a.shape[-1]}{transposed}"
        if E > MOST_GROUPS or self.room > MOST_ROWS:
            return f"there are {MOST_GROUPS} groups at most, and {MOST_ROWS} rows in a matrix"
        if self.gated and N % 2:
            return "with an activation mat_b has an even number of columns: its left half is the gate of its right one"
        if tuple(out.shape) != (*a.shape[:-1], self.columns):
            return f"out has to be {[*a.shape[:-1], self.columns]}"
        return self._problem_of_groups() or self._problem_of_scales() or self._problem_of_out()

    def _problem_of_groups(self) -> str | None:
        E = len(self.mat_b)
        if self.expanded and self.offs is not None:
            return "offs are for a mat_a of two dimensions; of three, each group is a matrix of its own, and has counts"
        if self.expanded and len(self.mat_a) != E:
            return f"mat_a has a matrix for each of mat_b, {E}"
        if not self.expanded and self.offs is None:
            return "a mat_a of two dimensions needs offs, the row after each group"
        for role, numbers in (("offs", self.offs), ("counts", self.counts)):
            if numbers is not None and (tuple(numbers.shape) != (E,) or numbers.dtype not in NUMBERS):
                return f"{role} is int32 or int64, of {E} elements, one for each group"
        return None

    def _problem_of_scales(self) -> str | None:
        rows, (E, K, N) = tuple(self.mat_a.shape[:-1]), self.mat_b.shape
        deep, wide = -(-K // SCALE_BLOCK), -(-N // SCALE_BLOCK)
        possible = {"scale_a": (rows, (*rows, deep)), "scale_b": ((E,), (E, N), (E, wide, deep))}
        for role, scale in (("scale_a", self.scale_a), ("scale_b", self.scale_b)):
            shapes = possible[role]
            if scale is not None and (scale.dtype != torch.float32 or tuple(scale.shape) not in shapes):
                return f"{role} is float32, of shape {' or '.join(str(list(shape)) for shape in shapes)}"
        return None

    def _problem_of_out(self) -> str | None:
        out = self.out
        if any(n > 1 and not stride for n, stride in zip(out.shape, out.stride(), strict=True)):
            return "elements of out are one place in memory, as those of x.expand() are; give it an output of its own"
        if any(matrix.is_neg() for matrix in (out, self.mat_a, self.mat_b)):
            return "a matrix is to be read with the other sign, as the imaginary part of a conjugate; give a copy"
        for role, tensor in self.given().items():
            if role != "out" and overlap(out, tensor):
                return f"out and {role} overlap in memory; give it an output of its own"
        return None

    def _check_numbers(self) -> None:
        """That groups are where they can be: in the simulator, and in debug mode, where the host waits for the GPU."""
        room, end = self.room, 0
        rooms = [room] * len(self.mat_b)
        if self.offs is not None:
            for group, offset in enumerate(self.offs.tolist()):
                if not end <= offset <= room:
                    raise InvalidValueError(
                        f"{NAME}(): offs[{group}] is {offset}. Give the row after each group: {end} at least, where "
                        f"the group before it ends, and {room} at most, the number of rows."
                    )
                rooms[group], end = offset - end, offset
        for group, count in enumerate([] if self.counts is None else self.counts.tolist()):
            if not 0 <= count <= rooms[group]:
                raise InvalidValueError(
                    f"{NAME}(): counts[{group}] is {count}. This group has room for {rooms[group]} rows."
                )
