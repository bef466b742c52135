"""When the simulator is active, and that it works whatever was imported first."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from covering import thorough

KERNEL = """
import torch, triton, triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

@triton.jit
def triton_sum(x, out, B: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, B))) + tl.cdiv(B, 5) + tl.sum(tl.zeros((B,), tl.float32)))

@gluon.jit
def gluon_sum(x, out, B: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    values = gl.load(x + gl.arange(0, B, layout=layout))
    gl.store(out, gl.sum(values) + gl.cdiv(B, 5) + gl.sum(gl.zeros_like(values)))
"""
LAUNCH = """
for kernel in (triton_sum, gluon_sum):
    out = torch.zeros(1)
    kernel[(1,)](torch.arange(8.0), out, B=8)
    print(out.item())
"""


# Imports torch once, then runs each program in a fork of its own: torch is most of the time that a program takes.
RUNNER = """
import json, os, sys, traceback, torch
for job in map(json.loads, sys.stdin):
    child = os.fork()
    if child == 0:
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(job["program"] + "." + name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), descriptor)
        os.environ.update(job["environment"])
        status = 0
        try:
            exec(compile(open(job["program"]).read(), job["program"], "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def runner():
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "TRITON_", "RANK"))}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", RUNNER], env=environment, **pipes) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def program(tmp_path):
    """Where the program of the test lies, so that the source of its kernels can be read."""
    return tmp_path / "program.py"


@pytest.fixture
def run(runner, program):
    def run(source: str, **environment: str) -> Done:
        program.write_text(textwrap.dedent(source))
        print(json.dumps({"program": str(program), "environment": environment}), file=runner.stdin, flush=True)
        code = int(runner.stdout.readline())
        return Done(code, *(Path(f"{program}.{name}").read_text() for name in ("out", "err")))

    return run


@pytest.mark.parametrize("first", ["import iris.simulator", "import triton, triton.language"])
@pytest.mark.parametrize("environment", [{}, {"IRIS_SIMULATOR": "1"}, {"TRITON_INTERPRET": "1"}])
def test_kernels_run_whatever_is_imported_first(run, first, environment):
    done = run(f"{first}\nimport iris.simulator\n{KERNEL}{LAUNCH}", **environment)
    assert done.stdout.split() == ["30.0", "30.0"], done.stderr


def test_builtins_may_have_been_imported_by_name(run):
    names = "from triton.experimental.gluon.language import load, store\nfrom triton.language import load as tl_load"
    kernels = KERNEL.replace("gl.load", "load").replace("gl.store", "store").replace("tl.load", "tl_load")
    done = run(f"{names}\nimport iris.simulator\n{kernels}{LAUNCH}")
    assert done.stdout.split() == ["30.0", "30.0"], done.stderr


def test_says_once_that_it_switched_itself_on(run):
    source = "import iris.simulator\nassert iris.simulator.ACTIVE"
    lines = run(source).stderr.splitlines()
    assert [line for line in lines if "simulator" in line] == [
        "[Iris] No GPU: kernels run in the simulator (IRIS_SIMULATOR=0 to forbid it)."
    ]
    for environment in ({"IRIS_SIMULATOR": "1"}, {"RANK": "1"}):
        assert "simulator" not in run(source, **environment).stderr


def test_zero_leaves_triton_alone(run):
    source = f"""
    import iris.simulator, os
    assert not iris.simulator.ACTIVE
    {textwrap.indent(KERNEL, "    ").strip()}
    print(type(triton_sum).__name__, type(gluon_sum).__name__, type(tl.sum).__name__)
    """
    done = run(source, IRIS_SIMULATOR="0")
    assert done.stdout.split() == ["JITFunction", "GluonJITFunction", "JITFunction"], done.stderr


def test_child_processes_decide_for_themselves(run):
    done = run("import iris.simulator, os\nprint(iris.simulator.ACTIVE, os.environ.get('TRITON_INTERPRET'))")
    assert done.stdout.split() == ["True", "None"]


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"IRIS_SIMULATOR": "yes"}, "IRIS_SIMULATOR='yes'"),
        ({"IRIS_SIMULATOR": "0", "TRITON_INTERPRET": "1"}, "IRIS_SIMULATOR='0'"),
        ({"IRIS_WAIT_TIMEOUT_S": "soon"}, "IRIS_WAIT_TIMEOUT_S='soon'"),
    ],
)
def test_a_value_that_means_nothing_is_an_error(run, environment, message):
    done = run("import iris.simulator", **environment)
    assert done.returncode != 0 and "InvalidSettingError" in done.stderr and message in done.stderr


@pytest.mark.parametrize("kernel", ["triton_sum", thorough("gluon_sum")])
def test_a_kernel_defined_too_early_is_named(run, program, kernel):
    source = f"""{KERNEL}
import iris.simulator
from iris.errors import KernelDefinedTooEarlyError

@triton.jit
def calls_it(x, out):
    {kernel}(x, out, 8)

for launch in ({kernel}, calls_it):
    try:
        launch[(1,)](*[torch.zeros(8)] * 2, **({{"B": 8}} if launch is {kernel} else {{}}))
    except KernelDefinedTooEarlyError as error:
        print(error)
"""
    done = run(source)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    for line in lines:
        assert f"{kernel!r} ({program}:" in line and "IRIS_SIMULATOR=0" in line


def test_an_aggregate_decorator_taken_before_iris_works(run):
    source = """
    import torch, triton, triton.language as tl
    from triton.language.core import _aggregate as aggregate
    import iris.simulator

    @aggregate
    class Pair:
        a: tl.tensor
        b: tl.tensor

        @triton.constexpr_function
        def __init__(self, a, b):
            self.a = a
            self.b = b

        @triton.jit
        def total(self):
            return self.a + self.b

    @triton.jit
    def kernel(out):
        tl.store(out, Pair(tl.load(out), 2).total())

    out = torch.full((1,), 5)
    kernel[(1,)](out)
    print(out.item())
    """
    done = run(source)
    assert done.stdout.split() == ["7"], done.stderr
