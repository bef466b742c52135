"""What one call of a fused operation is given, whether it fits together, and what a way to carry such calls has."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch

from iris.ccl.checks import check_tensor
from iris.ccl.protocols import CollectivesContext
from iris.errors import InvalidCollectiveError, InvalidConfigError, NotATensorError, WrongDeviceError, short_repr
from iris.ops.buffers import Needs
from iris.ops.config import FusedConfig

# CDNA3's formats of fp8, which have no negative zero; other GPUs have the other two.
FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, *FNUZ)
WIDE = (torch.float16, torch.bfloat16, torch.float32)

# The operations that gather A: its rows, and its columns, which a caller asks for by gather_dim="k".
GATHERS_ROWS, GATHERS_COLUMNS = GATHERS_A = ("all_gather_matmul", "all_gather_matmul_k")
OPERATIONS = (*GATHERS_A, "matmul_all_gather", "matmul_reduce_scatter", "matmul_all_reduce")


def title_of(name: str) -> str:
    """The operation of this name as its caller writes it, for errors."""
    return f"{GATHERS_ROWS}(gather_dim='k')" if name == GATHERS_COLUMNS else f"{name}()"


def check_tensors(name: str, given: Mapping[str, object]) -> None:
    """Raise unless these are tensors with memory of their own, by their roles."""
    for role, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            raise NotATensorError(tensor, f"{name}({role}=) takes a tensor")
        check_tensor(name, tensor)


def check_devices(name: str, given: dict[str, torch.Tensor], device: torch.device) -> None:
    """Raise unless these are tensors on ``device``, by their roles."""
    check_tensors(name, given)
    for role, tensor in given.items():
        if tensor.device != device:
            raise WrongDeviceError(
                f"{role} of {name}() is on {tensor.device}, and this context works on {device}. Move it there first."
            )


def described(given: dict[str, torch.Tensor]) -> str:
    """The tensors by their roles, for errors: shapes and dtypes."""
    return ", ".join(f"{role} {list(tensor.shape)} {tensor.dtype}" for role, tensor in given.items())


class Call(NamedTuple):
    """What one of the products was called with. ``a``: ``[M, K]``, this rank's; ``b``: ``[K, N]``.

    Of `GATHERS_COLUMNS`, ``b`` is ``[W K, N]``. ``gathered``: of `GATHERS_A`, where the A of all ranks is left besides.
    """

    name: str
    out: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    scale_a: torch.Tensor | None
    scale_b: torch.Tensor | None
    gathered: torch.Tensor | None = None

    @property
    def method(self) -> str:
        """That of ``ctx.ops``."""
        return GATHERS_ROWS if self.name == GATHERS_COLUMNS else self.name

    @property
    def title(self) -> str:
        """The operation as its caller writes it, for errors."""
        return title_of(self.name)

    @property
    def scaled(self) -> bool:
        return self.scale_a is not None or self.scale_b is not None

    @property
    def scaled_by_lines(self) -> bool:
        """Whether rows of A or columns of B have a factor each."""
        return any(scale is not None and scale.numel() != 1 for scale in (self.scale_a, self.scale_b))

    @property
    def rows(self) -> int:
        """Rows that are multiplied here."""
        return len(self.out) if self.name == GATHERS_ROWS else len(self.a)

    def scales(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """A factor for each row that is multiplied here and each column, or none at all."""
        if not self.scaled:
            return None, None
        one = torch.ones(1, dtype=torch.float32, device=self.a.device)
        wanted = ((self.scale_a, self.rows), (self.scale_b, self.b.shape[1]))
        rows, columns = ((one if scale is None else scale).reshape(-1).expand(n).contiguous() for scale, n in wanted)
        return rows, columns

    def kind(self, config: FusedConfig, direct: bool) -> tuple:
        """What is equal of calls that share a workspace. ``direct``: whether peers store into ``out`` itself."""
        # The precision is each rank's own, and the memory the same.
        of_all = config if config.allow_tf32 else dataclasses.replace(config, allow_tf32=True)
        (M, K), N = self.a.shape, self.b.shape[1]
        return (self.name, M, N, K, self.a.dtype, self.out.dtype, direct, of_all)

    def check(self, device: torch.device, size: int, config: Any) -> None:
        """Raise unless this can be computed on ``device`` by ``size`` ranks."""
        if config is not None and not isinstance(config, FusedConfig):
            raise InvalidConfigError(
                f"config={short_repr(config)} is not possible: it is an iris.ops.FusedConfig, or None."
            )
        check_devices(self.name, self.given(), device)
        problem = self._problem(size)
        if problem:
            raise InvalidCollectiveError(f"{self.title} of {size} ranks with {described(self.given())}: {problem}.")

    def given(self) -> dict[str, torch.Tensor]:
        """The tensors by their roles."""
        given = {"out": self.out, "A": self.a, "B": self.b}
        may_be_given = {"bias": self.bias, "scale_a": self.scale_a, "scale_b": self.scale_b, "gathered": self.gathered}
        return given | {role: tensor for role, tensor in may_be_given.items() if tensor is not None}

    def gathered_by_rank(self, size: int) -> torch.Tensor | None:
        """``gathered`` as ``[W, M, K]``, a view; None where there is none, or nothing to leave there."""
        if self.gathered is None or not self.gathered.numel():
            return None
        M, K = self.a.shape
        by_rows = self.name == GATHERS_ROWS
        return self.gathered.unflatten(0, (size, M)) if by_rows else self.gathered.unflatten(1, (size, K)).movedim(1, 0)

    def _problem(self, size: int) -> str | None:
        """What is wrong, in words."""
        out, a, b = self.out, self.a, self.b
        if not a.dim() == b.dim() == out.dim() == 2:
            return "out, A and B are matrices, with two dimensions"
        if a.dtype != b.dtype or a.dtype not in NARROW + WIDE or out.dtype not in WIDE:
            return "A and B have one dtype, fp8, fp16, bf16 or fp32, and out is fp16, bf16 or fp32"
        if a.dtype in FNUZ and a.is_cuda and not torch.version.hip:
            return f"{a.dtype} is for AMD's CDNA3"
        if self.name == GATHERS_COLUMNS and a.shape[1] * size != b.shape[0]:
            return f"B needs as many rows as the A of all ranks has columns, {a.shape[1] * size}"
        if self.name != GATHERS_COLUMNS and a.shape[1] != b.shape[0]:
            transposed = "; of a weight as torch.nn.Linear has it, give weight.t()" if a.shape[1] == b.shape[1] else ""
            return f"B needs as many rows as A has columns, {a.shape[1]}{transposed}"
        rows, N = len(a), b.shape[1]
        if self.name == "matmul_reduce_scatter":
            if rows % size:
                return f"each rank gets an equal part of the rows, so the number of rows of A is a multiple of {size}"
            rows //= size
        elif self.name not in ("matmul_all_reduce", GATHERS_COLUMNS):
            rows *= size
        if tuple(out.shape) != (rows, N):
            return f"out has to be [{rows}, {N}]"
        if self.bias is not None and (tuple(self.bias.shape) != (N,) or self.bias.dtype not in WIDE):
            return f"the bias has {N} elements, one a column, of fp16, bf16 or fp32"
        for role, scale, most in (("scale_a", self.scale_a, self.rows), ("scale_b", self.scale_b, N)):
            if scale is not None and (scale.dtype != torch.float32 or scale.numel() not in (1, most)):
                return f"{role} is float32, of 1 or {most} elements"
        if self.gathered is not None:
            M, K = a.shape
            whole = (M * size, K) if self.name == GATHERS_ROWS else (M, K * size)
            if self.gathered.dtype != a.dtype or tuple(self.gathered.shape) != whole:
                return f"gathered has to be {list(whole)}, of the dtype of A"
            if not N and self.gathered.numel():
                return "B has no columns, so that no A is moved; gather it by ctx.ccl.all_gather()"
        return self._problem_of_places()

    def _problem_of_places(self) -> str | None:
        """What is wrong with where results are to be."""
        read = {role: tensor for role, tensor in self.given().items() if role not in ("out", "gathered")}
        for role, written in (("out", self.out), ("gathered", self.gathered)):
            if written is None:
                continue
            if written.is_neg():
                return f"{role} is to be read with the other sign, as the imaginary part of a conjugate; give another"
            if any(n > 1 and not stride for n, stride in zip(written.shape, written.stride(), strict=True)):
                return f"elements of {role} are one place in memory, as those of x.expand() are; give another one"
            for other, matrix in read.items():
                if overlap(written, matrix):
                    return f"{role} and {other} overlap in memory; give it an output of its own"
            read[role] = written
        return None


class Algorithm(ABC):
    """A row of the table in `iris.ops.algorithms`: a way to carry the calls of one context.

    Attributes
    ----------
    name : str
    variant : str
        As `FusedConfig.variant` calls it.
    operations : tuple of str
        Those that it carries, as `Call.name` has them.
    """

    name: ClassVar[str]
    variant: ClassVar[str]
    operations: ClassVar[tuple[str, ...]] = OPERATIONS

    def __init__(self, context: CollectivesContext) -> None:
        self._context = context

    @abstractmethod
    def problem(self, call: Call, config: FusedConfig) -> str | None:
        """Why a configuration that asks for it cannot have the call, as an error says it; None if it can.

        By shapes and dtypes alone, which all ranks have in common: they have to come to the same answer.
        """

    def operands(self, call: Call) -> Call:
        """The call as this takes it: with copies of what does not lie so."""
        return call if call.bias is None else call._replace(bias=call.bias.contiguous())

    def direct(self, call: Call) -> bool:
        """Whether peers store into ``out`` itself, which is at the same place of the heap on all ranks then."""
        return False

    @abstractmethod
    def needs(self, call: Call, config: FusedConfig) -> Needs | None:
        """The workspace of a call; equal ones share it. None: it needs none."""

    @abstractmethod
    def prepare(self, call: Call, config: FusedConfig, buffers: Any) -> None:
        """Compile and load what carries calls like this one in this workspace. What needs none is not asked."""

    @abstractmethod
    def enqueue(self, call: Call, config: FusedConfig, buffers: Any, stream: int | None) -> None:
        """On the current stream, whose handle is ``stream``: None in the simulator, and if it needs no workspace."""

    def relaunch(self, call: Call, config: FusedConfig, buffers: Any) -> Callable[[Call, int | None], None] | None:
        """What enqueues later calls of the kind of this one in this workspace, with a stream's handle, if they may be
        launched without another look: see `iris.ops.known`."""
        return None


def overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the memory from one's first element to its last meets that of the other.

    Columns of one larger matrix that lie side by side do not overlap, though their rows lie in turn.
    """
    if not x.numel() or not y.numel():
        return False
    (x_begin, x_end), (y_begin, y_end) = span(x), span(y)
    return x_begin < y_end and y_begin < x_end and not _side_by_side(x, y)


def _side_by_side(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether these are columns of one larger matrix, and none of them the same."""
    if not x.dim() == y.dim() == 2 or not x.stride(1) == y.stride(1) == 1:
        return False
    pitch = x.stride(0) * x.itemsize
    if not pitch or y.stride(0) * y.itemsize != pitch:
        return False
    # Where a row of y begins in a row of the larger matrix, if that begins where one of x does.
    begin = (y.data_ptr() - x.data_ptr()) % pitch
    return x.shape[1] * x.itemsize <= begin and begin + y.shape[1] * y.itemsize <= pitch


def span(x: torch.Tensor) -> tuple[int, int]:
    """Where the memory of its elements begins, and the address after the last. x has elements."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.itemsize
