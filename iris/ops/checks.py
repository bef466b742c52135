"""What a fused operation may be asked for."""

from typing import Any

import torch

from iris.ccl.checks import check_tensor
from iris.errors import InvalidCollectiveError, InvalidConfigError, WrongDeviceError
from iris.ops.config import FusedConfig

NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDE = (torch.float16, torch.bfloat16, torch.float32)


def check(
    device: torch.device, name: str, out: Any, a: Any, b: Any, bias: Any, scale_a: Any, scale_b: Any, config: Any,
    rows_out: int, rows_in: int,
) -> None:  # fmt: skip
    """That the matrices fit together: ``rows_in`` rows of ``out`` for ``rows_out`` of ``a``."""
    if config is not None and not isinstance(config, FusedConfig):
        raise InvalidConfigError(f"config={config!r} is not an iris.ops.FusedConfig.")
    given = {"out": out, "A": a, "B": b, "bias": bias, "scale_a": scale_a, "scale_b": scale_b}
    for role, tensor in given.items():
        if tensor is None and role not in ("out", "A", "B"):
            continue
        check_tensor(name, tensor)
        if tensor.device != device:
            raise WrongDeviceError(
                f"{role} of {name}() is on {tensor.device}, and this context works on {device}. Move it there first."
            )
    told = f"{name}() with A of {_told(a)}, B of {_told(b)} and out of {_told(out)}"
    if not a.dim() == b.dim() == out.dim() == 2:
        raise InvalidCollectiveError(f"{told}: all three are matrices, with two dimensions.")
    if a.dtype != b.dtype or a.dtype not in NARROW + WIDE or out.dtype not in WIDE:
        raise InvalidCollectiveError(
            f"{told}: A and B have one dtype, fp8, fp16, bf16 or fp32, and out is fp16, bf16 or fp32."
        )
    if a.shape[1] != b.shape[0]:
        raise InvalidCollectiveError(f"{told}: B needs as many rows as A has columns, {a.shape[1]}.")
    if a.shape[0] % rows_in:
        raise InvalidCollectiveError(f"{told}: the rows of A are shared among {rows_in} ranks, so a multiple of that.")
    rows = a.shape[0] * rows_out // rows_in
    if tuple(out.shape) != (rows, b.shape[1]):
        raise InvalidCollectiveError(f"{told}: out has to be [{rows}, {b.shape[1]}].")
    if bias is not None and tuple(bias.shape) != (b.shape[1],):
        raise InvalidCollectiveError(f"{told}: the bias has {b.shape[1]} elements, one a column; it is {_told(bias)}.")
    # Of a gathered A, all rows; of a gathered result, those that are multiplied here.
    factors = rows if name == "all_gather_matmul" else a.shape[0]
    for role, scale, most in (("scale_a", scale_a, factors), ("scale_b", scale_b, b.shape[1])):
        if scale is not None and (scale.dtype != torch.float32 or scale.numel() not in (1, most)):
            raise InvalidCollectiveError(f"{told}: {role} is float32, of 1 or {most} elements; it is {_told(scale)}.")
    for role in ("A", "B"):
        if _overlap(out, given[role]):
            raise InvalidCollectiveError(f"{told}: out and {role} overlap in memory. Give it an output of its own.")


def scales(
    scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, rows: int, columns: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A factor for each row and each column, or none at all."""
    if scale_a is None and scale_b is None:
        return None, None
    one = torch.ones(1, device=(scale_b if scale_a is None else scale_a).device)
    wanted = ((scale_a, rows), (scale_b, columns))
    return tuple((one if scale is None else scale).reshape(-1).expand(n).contiguous() for scale, n in wanted)


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    if not x.numel() or not y.numel():
        return False
    (x_begin, x_end), (y_begin, y_end) = _span(x), _span(y)
    return x_begin < y_end and y_begin < x_end


def _span(x: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.itemsize


def _told(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {x.dtype}"
