"""Every kernel that the compile checks compile, with its arguments: what `scripts/digests.py` takes digests of."""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from covering import sample
from language.test_atomics import CASES as ATOMICS
from language.test_atomics import ORDERS
from tracing.traced_kernels import KERNELS as TRACED
from triton.runtime.jit import KernelInterface

from codegen import device_kernels, test_cdna3_kernels, test_clusters, test_fused_dtypes, test_generated_code
from codegen import test_every_kernel as every
from codegen import test_example_kernels as examples
from codegen import test_expert_kernels as experts
from codegen import test_grouped_kernels as grouped
from codegen import test_hopper_kernels as hopper
from codegen import test_low_latency_kernels as low_latency
from codegen import test_options as options
from codegen import test_regions as regions
from codegen import test_tiles as tiles
from codegen.offline import TARGETS
from iris.ccl.exchange import exchange
from iris.ccl.kernel_launch import leaving_room

NVIDIA, AMD = ("sm_90", "sm_100"), ("gfx942", "gfx950")


class Case(NamedTuple):
    """A launch, and the targets that the kernel is for."""

    name: str
    kernel: KernelInterface
    arguments: Any
    options: dict = {}
    targets: tuple = tuple(TARGETS)


def cases(target: str, setting: dict[str, str]) -> Iterator[Case]:
    """All of a target, each with a name of its own; with a ``setting`` in the environment, those that differ by it.

    A case of other targets is there too: it has no digest here, and the list says for which it is.
    """
    if setting:
        suffix = ", ".join(f"{variable}={value}" for variable, value in setting.items())
        for case in itertools.chain(_library(), _ordering(), _device_functions(target, [torch.float32])):
            yield case._replace(name=f"{case.name} with {suffix}")
        return
    yield from _library()
    yield from _variants(target)
    yield from _fused(target)
    yield from _grouped(target)
    yield from _hopper()
    yield from _cdna()
    yield from _clusters()
    yield from _experts(target)
    yield from _tiles()
    yield from _examples(target)
    yield from _ordering()
    yield from _device_functions(target, test_generated_code.DTYPES)
    yield from _atomics()
    yield from _contexts()
    yield from _options()


def _named(kernel: KernelInterface) -> str:
    return kernel.fn.__name__


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _library() -> Iterator[Case]:
    for name, kernel in every.kernels():
        yield Case(name, kernel, every.arguments_of(kernel))


def _variants(target: str) -> Iterator[Case]:
    """Kernels of collectives with other arguments."""
    atomics, one_hops = [every.atomic, every.atomic.gluon], [every.one_hop, every.one_hop.gluon]
    exchanges = {"triton": exchange, "gluon": exchange.gluon}
    apart = {"enable_fp_fusion": False}
    for language, kernel in zip(("triton", "gluon"), atomics, strict=True):
        yield Case(f"ccl {language} atomic without a lock", kernel, every.arguments_of(kernel, LOCKED=False))
    for language, kernel in zip(("triton", "gluon"), one_hops, strict=True):
        yield Case(f"ccl {language} one_hop rooted", kernel, every.arguments_of(kernel, ROOTED=True))
        yield Case(f"ccl {language} one_hop not early", kernel, every.arguments_of(kernel, EARLY=False))
    for (language, kernel), rows in itertools.product(exchanges.items(), ("one", "apart", "together")):
        arguments = every.arguments_of(kernel, PROGRAMS=0, ROWS=rows)
        yield Case(f"ccl {language} exchange, rows {rows}, without sizes", kernel, arguments)
    for name, kernel in every.MULTIPLIED.items():
        arguments = every.arguments_of(kernel, OP="premul_sum", factors=every.FLOAT32)
        yield Case(f"ccl {name} premul_sum", kernel, arguments, apart)
    room = leaving_room(8 * 32) if target in NVIDIA else {}  # as a launch asks for it
    for name, kernel in every.ROOMY.items():
        yield Case(f"ccl {name} of 8 ranks", kernel, every.arguments_of(kernel, W=8), {"num_warps": 8, **room})
    for name, kernel in regions.REGIONED.items():
        yield Case(f"ccl {name} of several regions", kernel, every.arguments_of(kernel, regions=3))
    for (name, kernel), size in itertools.product(every.PUSHES.items(), (2, 4)):
        part = every.largest_part(size)
        large, small = every.pushing(kernel, size, part, False), every.pushing(kernel, size, every.WARP_BYTES, True)
        yield Case(f"ccl {name} large, {size} ranks", kernel, large, {"num_warps": every.warps_for(part)})
        yield Case(f"ccl {name} small, {size} ranks", kernel, small, {"num_warps": 1})


def _fused(target: str) -> Iterator[Case]:
    """Products of Triton, by dtype, with what is chosen for them."""
    hip = "7.0" if target in AMD else None
    for kernel, dtype in itertools.product(test_fused_dtypes.KERNELS, test_fused_dtypes.SCALED):
        if test_generated_code.exists(target, dtype):
            arguments = test_fused_dtypes.arguments(kernel, dtype)
            name = f"ops {_named(kernel)} {_dtype(dtype)} with factors"
            yield Case(name, kernel, arguments, {"num_warps": 8, "num_stages": 2})
    for kernel, dtype in itertools.product(test_fused_dtypes.KERNELS, test_fused_dtypes.DTYPES):
        with mock.patch.object(torch.version, "hip", hip):
            arguments, chosen = test_fused_dtypes.as_chosen(kernel, dtype)
        yield Case(f"ops {_named(kernel)} {_dtype(dtype)} as chosen", kernel, arguments, chosen)


def _grouped(target: str) -> Iterator[Case]:
    for case in grouped.CASES:
        name = f"ops grouped_matmul {grouped.described(*case)}"
        yield Case(name, grouped.grouped_matmul, *grouped.in_triton(target, *case))
    for case in grouped.HOPPER_CASES:
        yield Case(f"ops hopper grouped_matmul {grouped.described(*case)}", *grouped.on_hopper(*case), ("sm_90",))
    beside = grouped.with_progress(*grouped.HOPPER_CASES[0])
    yield Case("ops hopper grouped_matmul beside another kernel", *beside, ("sm_90",))
    for weighted in (True, False):
        options = {"num_warps": grouped.STAGED_WARPS}
        arguments = grouped.in_stages(weighted)
        name = f"ops combine_in_stages {'' if weighted else 'un'}weighted"
        yield Case(name, grouped.combine_in_stages, arguments, options)
    for columns in (2048, 144):
        options = {"num_warps": grouped.NUM_WARPS}
        yield Case(
            f"ops quantise_rows of {columns}", grouped.quantise_rows, grouped.of_quantise(target, columns), options
        )
    for make, *given in grouped.GRADIENTS:
        yield Case(f"ops {make.__name__} {given}", *make(*given), {"num_warps": 4})
    by_rows = grouped.on_hopper(*grouped.HOPPER_CASES[0], by_rows=True)
    yield Case("ops hopper grouped_matmul by rows", *by_rows, ("sm_90",))


def _hopper() -> Iterator[Case]:
    alone = {"num_warps": 4}, ("sm_90",)
    for name, tile, by_columns, split in hopper.CASES:
        what = " ".join([str(tile), *(["by columns"] if by_columns else []), *(["split"] if split else [])])
        yield Case(f"ops hopper {name} {what}", *hopper.arguments(name, tile, by_columns, split), *alone)
    for name, tile, lines in hopper.CASES_OF_FP8:
        yield Case(f"ops hopper {name} fp8 {tile} lines {lines}", *hopper.of_fp8(name, tile, lines), *alone)
    yield Case("ops hopper start", hopper.start, (hopper.INT64, hopper.INT32, hopper.W), {"num_warps": 1}, ("sm_90",))


def _cdna() -> Iterator[Case]:
    cdna = test_cdna3_kernels
    for name, tile, dtype, lines in sample(
        cdna.NAMES, cdna.TILES, [torch.bfloat16, torch.float16], cdna.LINES, together=2
    ):
        what = f"{name} {tile} {_dtype(dtype)} lines {lines}"
        yield Case(f"ops cdna {what}", *cdna.launch(name, tile, dtype, *lines), {"num_warps": cdna.WARPS.value}, AMD)


def _clusters() -> Iterator[Case]:
    for kernel, (pieces, warps, by_row) in itertools.product(test_clusters.KERNELS, test_clusters.CASES):
        arguments = test_clusters.arguments(kernel, pieces, BY_ROW=by_row)
        yield Case(f"ops {_named(kernel)} {pieces} pieces", kernel, arguments, {"num_warps": warps}, NVIDIA)
    kernel, arguments = test_clusters.of_bf16(16)
    yield Case(f"ops {_named(kernel)} bf16", kernel, arguments, {"num_warps": 2}, NVIDIA)
    kernel, arguments = test_clusters.of_fp8(2)
    yield Case(f"ops {_named(kernel)} fp8", kernel, arguments, {"num_warps": 2})


def _experts(target: str) -> Iterator[Case]:
    """Dispatch of fp8, or of a number on the device; combine by other weights, or biased; halves; with statistics.

    And what compares choices.
    """
    warps = {"num_warps": 4}
    for form in experts.FORMS:
        yield Case(f"experts dispatch {form}", experts.dispatch, experts.of_form(form, target), warps)
    for name in experts.WEIGHTS:
        yield Case(f"experts combine {name}", experts.combine, experts.weighted(name), warps)
    yield Case("experts combine with two biases", experts.combine, experts.biased(), warps)
    yield Case("experts dispatch of a number on the device", experts.dispatch, experts.counted(), warps)
    for kernel in (experts.dispatch, experts.combine):
        yield Case(f"experts {_named(kernel)} with statistics", kernel, experts.with_statistics(kernel), warps)
    for kernel, phase in itertools.product((experts.dispatch, experts.combine), experts.PHASES):
        yield Case(f"experts {_named(kernel)} {phase}", kernel, experts.in_halves(kernel, phase), warps)
    for kernel, top_k in experts.CHOICES:
        yield Case(f"experts {_named(kernel)}, top {top_k}", kernel, experts.of_choices(kernel, top_k), warps)
    for name, kernel, arguments, given in low_latency.cases(target if target in low_latency.TARGETS else "gfx950"):
        yield Case(f"experts low_latency {name}", kernel, arguments, given, low_latency.TARGETS)


def _tiles() -> Iterator[Case]:
    for name, (kernel, arguments) in tiles.CALLS.items():
        yield Case(f"x {name}", kernel, (tiles.INT64, *arguments, *tiles.BLOCK))
    for operation, method in itertools.product(tiles.METHODS, (False, True)):
        name = f"x {operation} by {'method' if method else 'function'}"
        yield Case(name, tiles.operate, tiles.operation_by(operation, method))


def _examples(target: str) -> Iterator[Case]:
    seen: Counter = Counter()
    for folder, call in examples.CALLS:
        targets = examples.ONLY.get(folder, tuple(TARGETS))
        for launch in examples.launches(folder, call, target=target if target in targets else targets[0]):
            name = f"examples/{folder}:{launch.name}"
            seen[name] += 1
            name += f" {seen[name]}" if seen[name] > 1 else ""
            yield Case(name, launch.kernel, launch.arguments, launch.options, targets)


def _ordering() -> Iterator[Case]:
    for language, op in itertools.product(("triton", "gluon"), [*test_generated_code.RELEASES, "wait", "fence"]):
        yield Case(f"device {language} {op}", *test_generated_code.ordering(language, op))


def _device_functions(target: str, dtypes: list[torch.dtype]) -> Iterator[Case]:
    """Loads and stores of a peer's memory."""
    for form, dtype, masked in sample(test_generated_code.FORMS, dtypes, [False, True], together=2):
        if test_generated_code.exists(target, dtype):
            name = f"device {form} {_dtype(dtype)}{' masked' if masked else ''}"
            yield Case(name, *test_generated_code.access(form, dtype, masked))
    data = torch.zeros(4096)
    for kernel in (device_kernels.triton_scalar, device_kernels.gluon_scalar):
        yield Case(f"device {_named(kernel)}", kernel, (test_generated_code.CONTEXT, data, data, 1))
    hoisted = device_kernels.triton_hoisted
    yield Case("device triton_hoisted", hoisted, (test_generated_code.CONTEXT, data, 4096, 1, 1024))


def _atomics() -> Iterator[Case]:
    """Of each form every third, with orders by turns."""
    some = itertools.product(test_generated_code.ATOMIC_FORMS, ATOMICS)
    for (form, atomic), order in zip(itertools.islice(some, 0, None, 3), itertools.cycle(ORDERS), strict=False):
        name = f"device {form} atomic_{atomic[0]} {_dtype(atomic[1])} {' '.join(order)}"
        yield Case(name, *test_generated_code.atomic(form, atomic, order))


def _contexts() -> Iterator[Case]:
    for language, traced in itertools.product(TRACED, (False, True)):
        what = "traced" if traced else "not traced"
        yield Case(f"device {language} everything {what}", *test_generated_code.everything(language, traced))
        for form in range(8):
            arguments = test_generated_code.initialisation(language, form, traced)
            yield Case(f"device {language} context in form {form} {what}", *arguments)


def _options() -> Iterator[Case]:
    moves = ["load", "store", "get", "put", "copy"]
    for language, operation, load, store in sample(
        ["triton", "gluon"], moves, options.LOADS, options.STORES, together=2
    ):
        arguments = options.move(language, operation, load, store, None)
        yield Case(f"device {language} {operation} {load} {store}", *arguments)
    for language, operation, hint in itertools.product(["triton", "gluon"], [*moves, "add", "cas"], [None, 16]):
        yield Case(f"device {language} {operation} hint {hint}", *options.move(language, operation, ".cg", ".wt", hint))
