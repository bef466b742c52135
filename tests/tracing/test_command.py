"""python -m iris trace: a program that knows nothing of it is traced, and Perfetto can read what comes out."""

import json
import subprocess
from collections import defaultdict

import pytest
from conftest import TESTS, UNDER_TORCHRUN, import_path
from covering import EVERYTHING
from example_folders import skip_without_packages
from preloaded import LIMIT_S, python

from iris import simulator

EXAMPLES = TESTS.parent / "examples"
MESSAGES = EXAMPLES / "06_message_passing"
PROGRAMS = {
    "load_store": [MESSAGES / "load_store.py", "-r", "4", "--size", "20000"],
    "signal_wait": [MESSAGES / "signal_wait.py", "-r", "4", "--size", "20000"],
    "gluon_context": [MESSAGES / "gluon_context.py", "-r", "4", "--size", "20000"],
    "ring": [TESTS / "programs" / "ring.py", "4"],
}
GEMMS = {
    "07_gemm_all_scatter": (256, 512, 64),
    "07_gemm_all_scatter/gluon": (256, 512, 128),
    "08_gemm_all_reduce_atomics": (256, 256, 128),
    "09_gemm_one_shot_all_reduce": (256, 256, 128),
    "10_gemm_all_scatter_wg_specialization": (256, 512, 64),
    "11_gemm_all_scatter_producer_consumer": (256, 512, 64),
    "12_gemm_all_scatter_bulk_synchronous": (256, 512, 64),
    "14_all_gather_gemm": (256, 256, 64),
    "17_tensor_parallel_mlp": (48, 96, 64),
    "18_tensor_parallel_decoder": (2, 6, 2),
    "20_mixture_of_experts": (2, 4, 1),
}

pytestmark = [
    pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own; run it without torchrun"),
    pytest.mark.skipif(not simulator.ACTIVE, reason="its programs have as many ranks as they please"),
]


def run(*command, cwd):
    environment = {"PYTHONPATH": import_path(EXAMPLES, MESSAGES), "PATH": "/usr/bin:/bin", "IRIS_SIMULATOR": "1"}
    return subprocess.run(
        [*python(), *map(str, command)], env=environment, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S
    )


def trace_of(name, folder):
    """The trace of one of `PROGRAMS`."""
    result = run("-m", "iris", "trace", "--out", "t.json", "--picture", "t.svg", *PROGRAMS[name], cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "Between ranks" in result.stdout and "Waiting" in result.stdout
    assert (folder / "t.svg").read_text().lstrip().startswith("<?xml")
    return json.loads((folder / "t.json").read_text())


def check_format(trace):
    """The rules of the Trace Event Format for what is in it; returns flows as pairs of events."""
    events = trace["traceEvents"]
    assert {"M", "X"} <= {event["ph"] for event in events} <= {"M", "X", "s", "f"}
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and event["name"]
            threads[event["pid"], event["tid"]].append(event)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert named == threads.keys()
    for slices in threads.values():
        slices.sort(key=lambda event: (event["ts"], -event["dur"]))
        # Of a thread, two are apart or one is in the other. In nanoseconds, as sums of microseconds are not exact.
        ends = []
        for begin, end in ((round(1e3 * e["ts"]), round(1e3 * (e["ts"] + e["dur"]))) for e in slices):
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or end <= ends[-1]
            ends.append(end)

    def at(flow):
        """The innermost event that a flow is tied to."""
        there = threads[flow["pid"], flow["tid"]]
        return [each for each in there if each["ts"] <= flow["ts"] <= each["ts"] + each["dur"]][-1]

    flows = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            flows[event["id"]][event["ph"]] = event
    assert all(flow.keys() == {"s", "f"} for flow in flows.values())
    return [(at(flow["s"]), at(flow["f"])) for flow in flows.values()]


@pytest.mark.thorough
@pytest.mark.parametrize("name", PROGRAMS if EVERYTHING else ["ring"])
def test_a_trace_of_four_ranks(name, tmp_path):
    trace = trace_of(name, tmp_path)
    flows = check_format(trace)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    waits = [event for event in slices if event["name"] == "wait"]
    assert {event["pid"] for event in slices} == ({0, 1, 2, 3} if name == "ring" else {0, 1})
    # Whoever waits is told by a peer; but the first to send finds room.
    assert len(flows) >= len(waits) / 2 > 0
    for cause, end in flows:
        assert cause["cat"] in ("signal", "move") and end["name"] in ("wait", "arrival")
        assert cause["pid"] != end["pid"] and cause["ts"] <= end["ts"] + end["dur"]


def test_perfettos_own_parser_reads_it(tmp_path):
    processor = pytest.importorskip("perfetto.trace_processor", reason="the package perfetto is not installed")
    try:
        processor.TraceProcessor().close()
    except (OSError, subprocess.CalledProcessError, processor.TraceProcessorException) as error:
        pytest.skip(f"its program, which the package fetches from the network, cannot be had here: {error}")
    trace_of("ring", tmp_path)
    with processor.TraceProcessor(trace=str(tmp_path / "t.json")) as reader:
        (errors,) = reader.query("select count(*) as n from stats where severity = 'error' and value > 0")
        assert errors.n == 0
        ends = list(reader.query(
            "select cause.ts as begin, wait.ts + wait.dur as end from flow join slice cause on cause.id = slice_out "
            "join slice wait on wait.id = slice_in where cause.name = 'signal' and wait.name in ('wait', 'arrival')"
        ))  # fmt: skip
        assert ends and all(each.begin <= each.end for each in ends)


@pytest.mark.parametrize("example", GEMMS if EVERYTHING else ["10_gemm_all_scatter_wg_specialization"])
def test_an_example_traces_itself(example, tmp_path):
    skip_without_packages(example)
    sizes = [f"-{name}{size}" for name, size in zip("mnk", GEMMS[example], strict=True)]
    result = run(EXAMPLES / example / "benchmark.py", *sizes, "--trace", tmp_path / "t.json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    trace = json.loads((tmp_path / "t.json").read_text())
    flows = check_format(trace)
    names = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert (tmp_path / "t.svg").exists()
    if example in ("17_tensor_parallel_mlp", "18_tensor_parallel_decoder", "20_mixture_of_experts"):
        # Here torch multiplies, and collectives send messages, to which no flow leads.
        assert names == {"store", "wait"} and not flows
    else:
        assert {"compute"} < names and flows


def test_the_exit_status_and_the_options_are_the_programs(tmp_path):
    program = tmp_path / "fails.py"
    program.write_text(f"import sys\n{MEETS}print(sys.argv[1:])\nsys.exit(7)\n")
    result = run("-m", "iris", "trace", program, "--out", "mine", "--help", cwd=tmp_path)
    # It is shown all the same.
    assert result.returncode == 7 and "['--out', 'mine', '--help']" in result.stdout
    assert "exit status 7" in result.stdout and "barrier" in (tmp_path / "trace.json").read_text()


MEETS = """
import iris
with iris.iris(1 << 20) as ctx:
    ctx.device_barrier()
"""


def test_ranks_that_the_command_starts(tmp_path):
    program = tmp_path / "meets.py"
    program.write_text(MEETS)
    result = run("-m", "iris", "trace", "-r", 3, program, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1, 2}


def test_nothing_to_show_is_an_error(tmp_path):
    program = tmp_path / "nothing.py"
    program.write_text("print('so far')\n")
    result = run("-m", "iris", "trace", program, cwd=tmp_path)
    assert result.returncode == 1 and "so far" in result.stdout and "Nothing was recorded" in result.stdout
    assert not (tmp_path / "trace.json").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--out", "."], "is a directory"),
        (["--picture", "p.xyz"], "does not end in one of"),
        (["--nproc-per-node", "2"], "No such option '--nproc-per-node'"),
    ],
)
def test_what_cannot_be_is_said_before_the_program_runs(options, said, tmp_path):
    program = tmp_path / "prints.py"
    program.write_text("print('it ran')\n")
    result = run("-m", "iris", "trace", *options, program, cwd=tmp_path)
    assert result.returncode == 2 and said in result.stderr and "it ran" not in result.stdout


@pytest.mark.parametrize("value", ["yes", "2"])
def test_a_switch_that_means_nothing_is_refused(value):
    command = [*python(), "-c", "import iris"]
    environment = {"PYTHONPATH": import_path(), "PATH": "/usr/bin:/bin", "IRIS_TRACE": value}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert f"IRIS_TRACE='{value}' is not valid" in result.stderr
