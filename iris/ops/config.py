"""How a fused operation is carried out, where the caller knows better than the library's choice."""

from dataclasses import dataclass, fields

from iris.ccl.config import ALL_REDUCE_VARIANTS, MOST
from iris.errors import InvalidConfigError, short_repr

_CACHE_MODIFIERS = (None, ".ca", ".cg", ".cv")
_CHOICES = {
    "variant": ("kernel", "copies", "vendor"),
    "all_reduce_variant": ALL_REDUCE_VARIANTS,
    "cache_modifier_a": _CACHE_MODIFIERS,
    "cache_modifier_b": _CACHE_MODIFIERS,
}


@dataclass(frozen=True)
class FusedConfig:
    """Choices for one fused operation. All ranks must give the same.

    Attributes
    ----------
    variant : "kernel", "copies", "vendor"
        One kernel, which sends tiles while it computes others; the vendor's GEMM by chunks while copy engines move
        others, for all_gather_matmul and matmul_reduce_scatter; or the vendor's GEMM and a collective, one after the
        other. What follows is for the kernel.
    block_size_m, block_size_n, block_size_k : int
        Rows, columns and depth of a tile; powers of two from 16 on. Of float32 a tile has half the depth. On Hopper the
        Triton kernel is fastest with 128, 256 and 64, of fp8 128, 128 and 128 (`iris.ops.choose.TRITON`).
    group_size_m : int
        Rows of tiles that are computed one column after the other, since they share what the L2 cache holds of B. Not
        for all_gather_matmul by the Gluon kernel for CDNA3, which takes tiles as their rows arrive.
    num_sms : int
        Programs at most, each of which may take an SM (NVIDIA) or CU (AMD). Default: all of them. With the vendor's
        GEMM, of the collective.
    comm_sms : int
        Programs of `all_gather_matmul` that send A: in Triton before they multiply, on CDNA3 instead of it; the kernel
        for Hopper has none. Default: a sixteenth, in Triton at least all that find no tile of their own rank's rows.
    num_xcds, chunk_size : int
        Chiplets of the GPU (MI300X: 8), and tiles that go to one of them in turn: 1 and 1 are as if it had none.
    cache_modifier_a, cache_modifier_b : ".ca", ".cg", ".cv"
        Of the loads of A and B; see Triton's `load`.
    allow_tf32 : bool
        Products of float32 may be rounded to TF32.
    all_reduce_variant : "two_shot", or another one that `iris.ccl.Config` has
        Of `matmul_all_reduce`. The kernels' is "two_shot": each rank adds up a part of the rows, and stores the sums to
        all. With another one the vendor's GEMM comes first, and then `ctx.ccl.all_reduce` in this way.
    use_gluon : bool
        The kernel in Gluon. For Hopper: TMA, wgmma and warps with roles. Its tiles have 128 or 256 rows and up to 256
        columns, 32768 elements at most; of fp8 16384, and 128 is the best depth. On AMD CDNA3: matrix cores and buffer
        loads; compiled and simulated, never run there. Warps and stages are their own, and what is said here of caches
        is not for them; of chiplets not for Hopper's.
    num_warps, num_stages : int
        Of the Triton kernel. Stages by default: 3, and 2 on AMD, whose shared memory has room for no more on MI300.
    """

    block_size_m: int = 256
    block_size_n: int = 64
    block_size_k: int = 64
    group_size_m: int = 8
    num_sms: int | None = None
    num_xcds: int = 1
    chunk_size: int = 1
    cache_modifier_a: str | None = None
    cache_modifier_b: str | None = None
    allow_tf32: bool = True
    all_reduce_variant: str = "two_shot"
    variant: str = "kernel"
    comm_sms: int | None = None
    use_gluon: bool = False
    num_warps: int = 8
    num_stages: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            problem = _problem(field.name, getattr(self, field.name))
            if problem:
                raise InvalidConfigError(
                    f"FusedConfig({field.name}={short_repr(getattr(self, field.name))}) cannot work: {field.name} is "
                    f"{problem}."
                )

    def senders(self, programs: int, size: int, idle: int = 0) -> int:
        """Of ``programs``, those that move A to the other ranks; ``idle`` have nothing to multiply at first."""
        return max(1, min(self.comm_sms or max(programs // 16, idle), programs - 1)) if size > 1 else 0


def _problem(name: str, value: object) -> str | None:
    """What ``name`` should have been, if ``value`` is not that."""
    if name in _CHOICES:
        known = isinstance(value, str | None) and value in _CHOICES[name]
        return None if known else f"one of {', '.join(map(repr, _CHOICES[name]))}"
    if name in ("allow_tf32", "use_gluon"):
        return None if isinstance(value, bool) else "True or False"
    if name in ("num_sms", "comm_sms", "num_stages") and value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        return "a whole number"
    if name.startswith("block_size"):
        return None if 16 <= value <= 1024 and value & (value - 1) == 0 else "a power of two from 16 to 1024"
    if name == "num_warps":
        return None if 1 <= value <= 32 and value & (value - 1) == 0 else "a power of two from 1 to 32"
    return None if 0 < value <= MOST else f"at least 1, and at most {MOST}"
