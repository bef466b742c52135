"""`grouped_mm`: checks what it is asked for, chooses tiles, and launches a kernel."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from iris import simulator
from iris.compat.cuda import current_raw_stream
from iris.errors import InvalidConfigError, InvalidDtypeError, WrongDeviceError, short_repr
from iris.operators.graph_break import breaks_graph
from iris.operators.version_counter import bump_version
from iris.ops.call import check_tensors
from iris.ops.choose import allows_tf32
from iris.ops.config import FusedConfig
from iris.ops.grouped import on_hopper
from iris.ops.grouped.call import NAME, GroupedCall
from iris.ops.grouped.kernel_arguments import GroupedMatrix
from iris.ops.grouped.matmul import grouped_matmul
from iris.ops.hopper.grouped_matmul import hopper_grouped_matmul
from iris.ops.kernel import SIMULATED_PROGRAMS
from iris.ops.kernel_arguments import Tiling, by_name
from iris.ops.portable import TritonKernels
from iris.runtime.launch import addresses, prepare, remember
from iris.runtime.template import Template, template_of, tensor_keys

# Of so many programs one ends before the others, where another kernel begins beside them.
LEAVING = 8

# What launches kernels of one kind, and the tiles of calls: to choose them takes the host longer than a launch.
_prepared: dict[tuple, Any] = {}
_chosen: dict[tuple, FusedConfig] = {}
# Of calls that differ in addresses alone: what launches them, and its arguments.
_known: dict[tuple, tuple[Any, Template]] = {}


@breaks_graph("iris.ops.grouped_mm is for the host, and has no operator for graphs")
@torch.no_grad()
def grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: FusedConfig | None = None,
) -> torch.Tensor:
    """Each group of rows of A times a matrix of its own: ``out[r] = mat_a[r] @ mat_b[g]`` for the rows r of group g.

    On one GPU, without communication and without a context; on the current stream, in the order of its work. The host
    does not wait for the GPU: groups are read by the kernel, so a CUDA graph may be replayed with others. The first
    call of its kind compiles a kernel; make one before a capture. As `torch.nn.functional.grouped_mm`, whose ``offs``
    these are, and besides with groups that have padding after them.

    Parameters
    ----------
    mat_a : ``[rows, K]``, or ``[E, capacity, K]``
        Compact: the rows of all groups one after the other, as ``offs`` and ``counts`` say. Expanded: a matrix for each
        group, whose first ``counts[g]`` rows it has. Any strides. fp16, bf16, fp32 or fp8.
    mat_b : ``[E, K, N]``
        A matrix for each group, 1024 at most, of the dtype of ``mat_a``. Any strides. Hopper is fastest where columns
        are contiguous, as in ``weight.transpose(1, 2)`` of a weight ``[E, N, K]``; of fp8 the kernel for Hopper takes
        no others.
    offs : int32 or int64 ``[E]``, on the device
        Of a compact A: the row after each group's, padding included. Group g begins at row ``offs[g - 1]``, group 0 at
        row 0; these may be any rows. They do not decrease, and none is above the number of rows. Rows from ``offs[-1]``
        on are of no group.
    counts : int32 or int64 ``[E]``, on the device
        How many rows each group has, from its first one on: at most its room. Default: all of its room.
    scale_a, scale_b : float32
        What A and B are multiplied by. Of A one for each row, ``[rows]``, or for each row and 128 columns,
        ``[rows, ceil(K / 128)]``; of an expanded A ``[E, capacity]`` or ``[E, capacity, ceil(K / 128)]``. Of B one for
        each group, ``[E]``, for each column, ``[E, N]``, or for 128 columns and 128 rows,
        ``[E, ceil(N / 128), ceil(K / 128)]``. Any strides.
    activation : "silu_and_mul"
        ``out = silu(A B_left) * (A B_right)``, of the left and the right half of B's columns: N is even, and ``out``
        has N / 2 columns. (A tile computes the same columns of both halves, so nothing goes through memory.)
    out : of the shape of ``mat_a``, with N columns
        Where to store; it must not overlap A and B. Rows of no group are not written. Default: a new tensor, in which
        they hold anything.
    out_dtype : torch.dtype
        Of the new tensor: fp16, bf16 or fp32. Default: that of ``mat_a``; of fp8, bf16.
    config : FusedConfig
        Tiles, ``group_size_m``, ``num_sms``, chiplets, caches, warps, stages and ``use_gluon``. Default: chosen by
        dtype and by the rows that a group has on average at most.

    Returns
    -------
    torch.Tensor
        ``out``. It has no gradient. In a compiled function the graph breaks here.

    Sums are formed in float32 and rounded once. Rows of no group may hold anything, NaN too: the kernel in Triton does
    not read them, that for Hopper may, and makes no use of them. Numbers of ``offs`` and ``counts`` that are wrong are
    errors in the simulator and with ``IRIS_DEBUG=1``; elsewhere rows are computed wrongly or not at all, and nothing
    outside of ``out`` is written.

    Raises `NotATensorError`, `WrongDeviceError`, `InvalidCollectiveError` (shapes and dtypes that do not fit together),
    `InvalidDtypeError`, `UnknownChoiceError`, `InvalidConfigError` (a configuration that cannot do it), and
    `InvalidValueError` (numbers).
    """
    check_tensors(NAME, {"mat_a": mat_a, "mat_b": mat_b} | ({} if out is None else {"out": out}))
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise InvalidDtypeError(
            f"{NAME}(out_dtype={short_repr(out_dtype)}) is not possible: it is a torch.dtype, or None."
        )
    if out is None:
        out = _new(mat_a, mat_b, activation, out_dtype)
    elif out_dtype is not None and out_dtype != out.dtype:
        raise InvalidConfigError(f"{NAME}(out_dtype={out_dtype}) has an out of {out.dtype}. Leave out_dtype out.")
    call = GroupedCall(out, mat_a, mat_b, offs, counts, scale_a, scale_b, activation)
    call.check(config)
    _check_device(mat_a)
    if out.numel():
        enqueue(call, config)
    bump_version(out)
    return out


def _new(
    mat_a: torch.Tensor, mat_b: torch.Tensor, activation: str | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    columns = mat_b.shape[-1] // (1 if activation is None else 2) if mat_b.dim() else 0
    dtype = out_dtype or (mat_a.dtype if mat_a.itemsize > 1 else torch.bfloat16)
    return mat_a.new_empty((*mat_a.shape[:-1], columns), dtype=dtype)


def _check_device(mat_a: torch.Tensor) -> None:
    if simulator.ACTIVE or not mat_a.is_cuda:
        if mat_a.is_cuda != (not simulator.ACTIVE):
            raise WrongDeviceError(
                f"mat_a of {NAME}() is on {mat_a.device}, and kernels of this process run "
                f"{'in the simulator, on the CPU' if simulator.ACTIVE else 'on a GPU'}. Move it there first."
            )
    elif mat_a.device.index != torch.cuda.current_device():
        raise WrongDeviceError(
            f"mat_a of {NAME}() is on {mat_a.device}, and the current device is {torch.cuda.current_device()}. "
            "Call it inside of torch.cuda.device(mat_a.device)."
        )


@functools.cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs(config: FusedConfig) -> int:
    """Those of a launch."""
    most = SIMULATED_PROGRAMS if simulator.ACTIVE else multiprocessors(torch.cuda.current_device())
    return min(config.num_sms or most, most)


def _chosen_for(call: GroupedCall, launch_key: tuple) -> FusedConfig:
    """The tiles of a call for which none are given."""
    key = (launch_key, call.room, len(call.mat_b), allows_tf32())
    config = _chosen.get(key)
    if config is None:
        config = on_hopper.hopper_tiles(call)
        if simulator.ACTIVE or on_hopper.problem(call, config):
            config = portable_tiles(call)
        remember(_chosen, key, config)
    return config


def _check(call: GroupedCall, config: FusedConfig) -> None:
    """Raise unless this configuration can do it."""
    if config.variant != "kernel":
        raise InvalidConfigError(f"FusedConfig(variant={config.variant!r}) cannot do {NAME}(): it is a kernel's alone.")
    why = on_hopper.problem(call, config) if config.use_gluon else None
    if why:
        raise InvalidConfigError(f"FusedConfig(use_gluon=True) cannot do this {NAME}(): {why}.")


def portable_tiles(call: GroupedCall) -> FusedConfig:
    """The tiles of the kernel in Triton: as many rows as a group has, for no weight is read twice then."""
    height = max(16, min(128, 1 << max(0, call.rows_per_group - 1).bit_length()))
    return _tiles(call.mat_a.itemsize, height, bool(torch.version.hip), allows_tf32())


@functools.cache
def _tiles(itemsize: int, height: int, on_amd: bool, allow_tf32: bool) -> FusedConfig:
    wide = height == 128 and itemsize == 2 and not on_amd
    # Products of float32 that are not rounded to TF32 are of single elements, and take more registers.
    columns = 256 if wide else 64 if itemsize == 4 else 128
    return FusedConfig(
        block_size_m=height,
        block_size_n=columns,
        # A row of a tile has 128 bytes, as fp8 has with a scale of each block of 128.
        block_size_k=128 if itemsize == 1 else 64,
        num_warps=8 if height == 128 else 4,
        num_stages=3 if wide else None,
        allow_tf32=allow_tf32,
    )


def enqueue(call: GroupedCall, config: FusedConfig | None, only_prepare: bool = False) -> None:
    """On the current stream, a call that has been checked; or only compile and load what carries such calls."""
    own = (call.out, call.mat_a, call.mat_b, call.offs, call.counts)
    alike = None if only_prepare else _call_key(call, config, own)
    known = _known.get(alike) if alike is not None else None
    if known is not None:
        run, fill = known
        run(_stream(), fill([each for each in own if each is not None]))
        return
    launch_key = _launch_key(call)
    if config is None:
        config = _chosen_for(call, launch_key)
    else:
        _check(call, config)
    kernel, arguments, options = launch_of(call, config)
    given, key = by_name(kernel, **arguments), (config, launch_key)
    run = _prepared.get(key)
    if run is None:
        run = prepare(kernel, (programs(config), 1, 1), *given, **options)
        remember(_prepared, key, run)
    if only_prepare:
        return
    run(_stream(), addresses(given))
    template = None if alike is None else template_of(given, [each for each in own if each is not None])
    if template is not None and alike is not None:
        remember(_known, alike, (run, template))


def _stream() -> int | None:
    return None if simulator.ACTIVE else current_raw_stream(torch.cuda.current_device())


def _call_key(call: GroupedCall, config: FusedConfig | None, own: Sequence[torch.Tensor | None]) -> tuple | None:
    """What is the same in calls whose launches differ in addresses alone; None where each has to be looked at."""
    # Without a config, products of float32 are in the precision that torch's are in then.
    if call.progress or call.scale_a is not None or call.scale_b is not None or call.mat_a.dtype is torch.float32:
        return None
    keys = tensor_keys(own)
    return None if keys is None else (keys, config, call.activation)


def _launch_key(call: GroupedCall) -> tuple:
    """What is the same in calls that one prepared launch serves. Numbers of rows and groups may differ."""
    tensors = [
        (role, each.dtype, each.stride(), each.shape[-1] if each.dim() > 1 else 0, each.data_ptr() % 16)
        for role, each in call.given().items()
    ]
    device = call.mat_a.device.index
    # Of one group it does not matter how far it is to the next.
    groups = len(call.mat_b)
    return (device, call.form(), groups == 1, call.progress and groups, tuple(tensors))


def launch_of(call: GroupedCall, config: FusedConfig) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The kernel, its arguments by name, and Triton's options."""
    scale_a, scale_b = call.factors()
    given = {
        **{"scale_a": scale_a, "scale_b": scale_b, "groups": call.groups(), "out": grouped(call.out)},
        **{"room": call.room, "E": len(call.mat_b), "FORM": call.form()},
    }
    if config.use_gluon:
        # These are the warps of the first multiplier; the other roles have theirs besides.
        of_kernel = on_hopper.hopper_arguments(call, config, programs(config) // LEAVING if call.progress else 0)
        return hopper_grouped_matmul, given | of_kernel, {"num_warps": 4}
    return grouped_matmul, given | triton_arguments(call, config), TritonKernels.options(config)


def triton_arguments(call: GroupedCall, config: FusedConfig) -> dict[str, Any]:
    """Of the kernel in Triton alone."""
    # As in `iris.ops.portable`; and within a block of columns that share a scale.
    itemsize = call.mat_a.itemsize
    depth = max(32 if itemsize == 1 else 16, config.block_size_k * 2 // max(2, itemsize))
    tiling = Tiling(
        BLOCK_M=config.block_size_m,
        # A product has 16 columns at least, and there are two with an activation.
        BLOCK_N=max(config.block_size_n, 32 if call.gated else 16),
        BLOCK_K=min(depth, 128) if call.blocked else depth,
        GROUP=config.group_size_m,
        XCDS=config.num_xcds,
        CHUNK=config.chunk_size,
        CACHE_A=config.cache_modifier_a or "",
        CACHE_B=config.cache_modifier_b or "",
        ALLOW_TF32=config.allow_tf32,
    )
    return {
        **{"a": grouped(call.mat_a), "b": grouped(call.mat_b)},
        **{"N": call.columns, "K": call.mat_b.shape[1], "TILING": tiling},
    }


def grouped(tensor: torch.Tensor) -> GroupedMatrix:
    """The tensor as kernels take it."""
    return GroupedMatrix(tensor, *((0,) if tensor.dim() == 2 else ()), *tensor.stride())
