"""A call of `all_reduce_rms_norm`: its tensors, and what they may be."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from iris.errors import InvalidCollectiveError
from iris.ops.call import NARROW, WIDE, check_devices, described
from iris.ops.kernel_arguments import NormTensors

# Columns of a row at most: one program's registers hold it.
MOST_COLUMNS = 32768
# Who keeps the residual: every rank all of it; or each rank the rows that it owns, one W-th of them, by rank.
REPLICATED, SHARDED = "replicated", "sharded"
LAYOUTS = (REPLICATED, SHARDED)


class NormCall(NamedTuple):
    """A call of `all_reduce_rms_norm`. ``input``: ``[..., H]``; ``weight``: ``[H]``; what is besides is contiguous."""

    out: torch.Tensor
    input: torch.Tensor
    weight: torch.Tensor
    residual: torch.Tensor | None
    scale: torch.Tensor | None
    row_scales: torch.Tensor | None

    @property
    def columns(self) -> int:
        return self.weight.numel()

    @property
    def rows(self) -> int:
        return self.input.numel() // self.columns

    def check(self, device: torch.device, owners: int | None = None) -> None:
        """Raise unless this can be computed on ``device``.

        ``owners``: among how many ranks the residual is sharded; None if each has all of it.
        """
        check_devices("all_reduce_rms_norm", self.given(), device)
        problem = self._problem(owners)
        if problem:
            raise InvalidCollectiveError(f"all_reduce_rms_norm() with {described(self.given())}: {problem}.")

    def given(self) -> dict[str, torch.Tensor]:
        """The tensors by their roles."""
        needed = ("out", "input", "weight")
        return {role: tensor for role, tensor in self._asdict().items() if tensor is not None or role in needed}

    def _problem(self, owners: int | None) -> str | None:
        """What is wrong, in words."""
        x, columns = self.input, self.columns
        if self.weight.dim() != 1 or x.dim() == 0 or x.shape[-1] != columns or not 0 < columns <= MOST_COLUMNS:
            return f"weight has one dimension, of as many elements as a row of input has, 1 to {MOST_COLUMNS}"
        if x.dtype not in WIDE or self.weight.dtype not in WIDE:
            return "input and weight are fp16, bf16 or fp32"
        if not _lies_as(self.out, x.shape):
            return "out has the shape of input, and is contiguous"
        if owners is None:
            if not _lies_as(self.residual, x.shape):
                return "residual has the shape of input, and is contiguous"
        elif self.rows % owners:
            return f"{owners} ranks cannot own equal parts of {self.rows} rows; give a multiple"
        elif not _lies_as(self.residual, (self.rows // owners, columns)):
            return f"a residual that is sharded has shape {[self.rows // owners, columns]}, and is contiguous"
        if self.residual is not None and self.residual.dtype not in WIDE:
            return "the residual is fp16, bf16 or fp32"
        clash = self._clash(owners is not None)
        if clash:
            return f"{clash} overlap in memory, in a way that it does not allow; give it an output of its own"
        if self.out.dtype not in WIDE + NARROW:
            return "out is fp8, fp16, bf16 or fp32"
        if self.out.dtype not in NARROW and (self.scale is not None or self.row_scales is not None):
            return "scale and row_scales are for an out of fp8"
        if self.scale is not None and self.row_scales is not None:
            return "it takes scale, which is given, or row_scales, which are computed, and not both"
        if self.scale is not None and (self.scale.dtype != torch.float32 or self.scale.numel() != 1):
            return "scale is one element of float32"
        scales = self.row_scales
        if scales is not None and not (
            scales.dtype == torch.float32 and scales.numel() == self.rows and scales.is_contiguous()
        ):
            return f"row_scales are {self.rows} contiguous elements of float32, one a row"
        return None

    def _clash(self, sharded: bool) -> str | None:
        """What is written where something else lies, but for an input that is written over in whole, row by row.

        Not by a ``sharded`` residual: its rows begin where the input does on rank 0 alone, and all ranks refuse a call.
        """
        if self.residual is not None and _overlap(self.out, self.residual):
            return "out and residual"
        for written, tensor in (("out", self.out), ("residual", self.residual)):
            for read, other in (("input", self.input), ("weight", self.weight)):
                # What is not contiguous is copied before.
                if tensor is None or not other.is_contiguous() or not _overlap(tensor, other):
                    continue
                in_place = (tensor.data_ptr(), tensor.dtype) == (other.data_ptr(), other.dtype)
                if read == "weight" or not in_place or (sharded and written == "residual"):
                    return f"{written} and {read}"
        return None

    def kind(self) -> tuple:
        """What makes the code of one call differ from another's."""
        return tuple(x if x is None else (x.dtype, x.data_ptr() % 16) for x in self) + (self.columns,)

    def largest(self) -> float:
        """What ``out`` can hold, if it is of fp8."""
        return torch.finfo(self.out.dtype).max if self.out.dtype in NARROW else 0.0

    def of(self, rows: slice) -> "NormCall":
        """Of these rows alone."""
        out, input = (x.view(-1, self.columns)[rows] for x in (self.out, self.input))
        residual = None if self.residual is None else self.residual.view(-1, self.columns)[rows]
        scales = None if self.row_scales is None else self.row_scales.view(-1)[rows]
        return self._replace(out=out, input=input, residual=residual, row_scales=scales)

    def owned(self, rank: int, owners: int) -> "NormCall":
        """Of the rows alone that a rank owns of so many; the residual has no others."""
        rows = slice(rank * self.rows // owners, (rank + 1) * self.rows // owners)
        return self._replace(residual=None).of(rows)._replace(residual=self.residual)

    def tensors(self, input: torch.Tensor) -> NormTensors:
        """For kernels: with ``input``, or the sums that are there already."""
        return NormTensors(input, self.residual, self.weight, self.out, self.scale, self.row_scales)


def _lies_as(tensor: torch.Tensor | None, shape: Sequence[int]) -> bool:
    """Whether what is given is contiguous and has this shape."""
    return tensor is None or (tensor.shape == shape and tensor.is_contiguous())


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    return x.data_ptr() < y.data_ptr() + y.nbytes and y.data_ptr() < x.data_ptr() + x.nbytes
