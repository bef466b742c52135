"""How kernels are defined and launched: what the JIT's launcher accepts and refuses, the simulator does too."""

import gc
import linecache
import py_compile
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from typing import NamedTuple

import numpy
import pytest
import torch
import triton
import triton.language as tl
from covering import thorough
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris.errors import KernelSourceMissingError, LaunchError
from iris.simulator import ACTIVE

assert ACTIVE


@triton.jit
def add_one(x, y, n, B: tl.constexpr):
    offsets = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + offsets, tl.load(x + offsets, mask=offsets < n) + 1, mask=offsets < n)
    tl.atomic_add(y + n, 1.0)


@gluon.jit
def gluon_add_one(x, y, n, B: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offsets = gl.program_id(0) * B + gl.arange(0, B, layout=layout)
    gl.store(y + offsets, gl.load(x + offsets, mask=offsets < n) + 1, mask=offsets < n)
    gl.atomic_add(y + n, 1.0)


CONFIGS = [triton.Config({"B": 32}, num_warps=2), triton.Config({"B": 64}, num_stages=3)]


@pytest.mark.parametrize("kernel", [add_one, gluon_add_one])
@pytest.mark.parametrize("options", [{}, {"cache_results": True}], ids=str)
def test_an_autotuned_kernel_runs_once_in_its_first_configuration(kernel, options):
    tuned = triton.autotune(CONFIGS, key=["n"], **options)(kernel)
    for n in (100, 100, 70):
        x, y = torch.randn(n), torch.zeros(n + 1)
        tuned[lambda meta: (triton.cdiv(meta["n"], meta["B"]),)](x, y, n)
        torch.testing.assert_close(y[:n], x + 1, rtol=0, atol=0)
        assert y[n] == triton.cdiv(n, 32)
    assert tuned.best_config is CONFIGS[0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("autotuned", [thorough(False), True])
def test_a_kernel_in_a_compiled_function(autotuned):
    torch.compiler.reset()
    kernel, options = (triton.autotune(CONFIGS, key=["n"])(add_one), {}) if autotuned else (add_one, {"B": 32})

    @torch.compile(backend="aot_eager")
    def function(x):
        x, y = torch.sin(x), torch.zeros(len(x) + 1)
        kernel[lambda meta: (triton.cdiv(meta["n"], meta["B"]),)](x, y, len(x), **options)
        return 2 * y

    for n in (100, 70):
        x = torch.randn(n)
        torch.testing.assert_close(function(x), 2 * torch.cat([torch.sin(x) + 1, torch.tensor([(n + 31) // 32])]))


def test_heuristics_and_pruning_choose_as_they_do_on_a_gpu():
    chosen = triton.heuristics({"B": lambda args: triton.next_power_of_2(args["n"])})(add_one)
    pruned = triton.autotune(CONFIGS, key=["n"], prune_configs_by={"early_config_prune": lambda c, *_, **__: c[1:]})
    for kernel, programs in ((chosen, 1), (pruned(add_one), 2)):
        y = torch.zeros(101)
        kernel[lambda meta: (triton.cdiv(100, meta["B"]),)](torch.zeros(100), y, 100)
        assert y[100] == programs


def test_compiler_options_are_accepted():
    y = torch.zeros(9)
    add_one[(1,)](torch.zeros(8), y, 8, 8, num_warps=8, num_stages=2, num_ctas=1, maxnreg=64, waves_per_eu=2)
    assert y[8] == 1


def launch(x, grid=(1,), **options):
    add_one[grid](x, torch.zeros(9), 8, 8, **options)


class HostContext:
    def get_device_context(self):
        return torch.zeros(8)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: launch(torch.zeros(8), num_warp=4), "'add_one' has no parameter 'num_warp'"),
        (
            lambda: add_one(torch.zeros(8), torch.zeros(9), 8, 8),
            r"outside a kernel. Call it inside one or, .*add_one\[grid\]",
        ),
        (lambda: launch([1.0] * 8), "'x' of kernel 'add_one' is a list"),
        (lambda: launch(numpy.zeros(8)), "'x' of kernel 'add_one' is a ndarray"),
        (lambda: launch("x"), "'x' of kernel 'add_one' is a str"),
        (
            lambda: launch(HostContext()),
            r"'x' of kernel 'add_one' is the host's context: .* ctx.get_device_context\(\)",
        ),
        (lambda: launch(torch.zeros(8, dtype=torch.complex64)), "'x' of kernel 'add_one' has dtype torch.complex64"),
        (lambda: add_one[(1,)](torch.zeros(8)), r"'add_one' takes \(x, y, n, B\): missing .*'y'"),
        (lambda: launch(torch.zeros(8), grid=4), "'add_one' has the grid 4. A grid is a tuple"),
        (lambda: launch(torch.zeros(8), grid=lambda _: (0.5,)), r"'add_one' has the grid \(0.5,\)"),
        (lambda: launch(torch.zeros(8), grid=(1, 1, 1, 1)), r"'add_one' has the grid \(1, 1, 1, 1\)"),
    ],
)
def test_what_no_gpu_would_take_is_refused(call, text):
    with pytest.raises(LaunchError, match=text) as caught:
        call()
    assert isinstance(caught.value, TypeError)


def module_of(file, source):
    file.write_text(source)
    spec = spec_from_file_location(file.stem, file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_kernel_is_what_it_was_when_it_was_defined(tmp_path):
    """As with the compiler: an edit of the file while the program runs changes nothing."""
    file = tmp_path / "edited.py"
    source = """
    import triton, triton.language as tl

    @triton.jit
    def kernel(x):
        value = 5
        tl.store(x, value)
    """
    module = module_of(file, textwrap.dedent(source))
    file.write_text("\n" * 3 + textwrap.dedent(source).replace("value = 5", "value = 6"))
    linecache.checkcache(str(file))
    x = torch.zeros(1)
    module.kernel[(1,)](x)
    assert x.item() == 5


KERNEL = """
import triton, triton.language as tl
from triton.experimental import gluon

@{decorator}
def kernel(x):
    value = 5
    tl.store(x, value)
"""


def run_as_string(source, tmp_path):
    exec(source, {"__name__": "typed"})


def run_where_another_text_has_the_name(source, tmp_path):
    other = "def another(x):\n    pass\n" * 8
    linecache.cache["<string>"] = (len(other), None, other.splitlines(keepends=True), "<string>")
    try:
        run_as_string(source, tmp_path)
    finally:
        del linecache.cache["<string>"]


def run_from_bytecode_alone(source, tmp_path):
    file, compiled = tmp_path / "gone.py", tmp_path / "gone.pyc"
    file.write_text(source)
    py_compile.compile(str(file), str(compiled), doraise=True)
    file.unlink()
    spec = spec_from_file_location("gone", compiled)
    spec.loader.exec_module(module_from_spec(spec))


@pytest.mark.parametrize("run", [run_as_string, run_where_another_text_has_the_name, run_from_bytecode_alone])
@pytest.mark.parametrize("decorator", ["triton.jit", "gluon.jit"])
def test_a_kernel_whose_source_cannot_be_read_is_refused(tmp_path, run, decorator):
    """It would run as the Python that it is, where ``value`` is no tensor."""
    with pytest.raises(KernelSourceMissingError, match=r"kernel 'kernel' \(.*:5\) cannot be read"):
        run(KERNEL.format(decorator=decorator), tmp_path)


def test_first_launches_by_several_threads(tmp_path):
    count, lines = 20, 40
    body = "".join(f"    tl.atomic_add(out, ({line} + tl.program_id(0)) * 2)\n" for line in range(lines))
    kernels = "".join(f"@triton.jit\ndef kernel{i}(out):\n{body}\n" for i in range(count))
    module = module_of(tmp_path / "many.py", f"import triton, triton.language as tl\n\n{kernels}")
    out = torch.zeros(count, dtype=torch.int32)

    def launch(i):
        getattr(module, f"kernel{i}")[(1,)](out[i:])

    def let_others_run(*_):
        time.sleep(1e-5)

    # What the collector of garbage calls runs in the middle of anything that allocates.
    gc.callbacks.append(let_others_run)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(launch, range(count)))
    finally:
        gc.callbacks.remove(let_others_run)
    assert out.tolist() == [lines * (lines - 1)] * count


class Interval(NamedTuple):
    first: tl.tensor
    length: tl.constexpr


@triton.jit
def shifted(interval, by):
    moved = Interval(interval.first + by, interval.length)
    return moved


@triton.jit
def fill(out, interval):
    result = shifted(interval, 2)
    offsets = result.first + tl.arange(0, 8)
    tl.store(out + offsets, 1, mask=offsets < result.first + result.length)


def test_a_named_tuple_keeps_its_names_when_it_is_assigned():
    out = torch.zeros(16, dtype=torch.int32)
    fill[(1,)](out, Interval(3, 6))
    assert out.nonzero().flatten().tolist() == [5, 6, 7, 8, 9, 10]


def factory(jit, scale):
    @jit
    def scaled(x):
        return x * scale

    @jit
    def kernel(x, out, add: tl.constexpr = 1):
        tl.store(out, scaled(tl.load(x)) + add)

    return kernel


def test_kernels_close_over_functions_and_values():
    x, out = torch.tensor([3.0]), torch.zeros(1)
    for scale, expected in ((2, 7.0), (5, 16.0)):
        factory(triton.jit, tl.constexpr(scale))[(1,)](x, out)
        assert out.item() == expected


@triton.jit
def fail_in_a_library(x):
    tl.store(x, tl.load(x), cache_modifier=".none such")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
def test_the_line_of_an_exception_is_the_users():
    """And not the innermost one, which is Triton's, or generated."""
    with pytest.raises(Exception) as caught:
        fail_in_a_library[(1,)](torch.zeros(1))
    line = fail_in_a_library.fn.__code__.co_firstlineno + 2
    assert caught.value.__notes__[-1].endswith(f"of kernel 'fail_in_a_library', at {__file__}:{line}")
