import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from covering import SAMPLED, UNDER_TORCHRUN, few_that_show_all
from preloaded import python
from rank_pool import Hosts, RankPool, Torchrun, hosts_of_torchrun

TESTS = Path(__file__).parent

# The server of torch's store asks the system for the name of each client, one after the other. Where no name server
# answers, that takes 10 s a client unless it is told to give up earlier (resolv.conf(5)).
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_sessionstart():
    # A shell that starts pytest in the background has it ignore Ctrl-C, and so would all programs of the tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if UNDER_TORCHRUN:
        Torchrun.join()


def pytest_collection_finish():
    # Collections, of which some tests and pytest at its end ask for several, need not go through torch's modules.
    gc.freeze()


def import_path(*folders):
    """PYTHONPATH for a process that a test starts: ``folders``, the project, and whatever this process was given."""
    given = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    return os.pathsep.join(map(str, [*folders, TESTS.parent, *given]))


def pytest_generate_tests(metafunc):
    """`@pytest.mark.ranks(1, 2, 4)` runs a test that takes ``ranks`` with each of these numbers of ranks.

    Under torchrun it runs with the ranks that are there, or not at all if it says ``exactly=True`` and means others.
    Tests with `rank_pool.Hosts`, and no others, run where the ranks count as several hosts (``IRIS_TEST_HOSTS``).
    """
    if "ranks" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("ranks")
        counts = mark.args if mark else (2,)
        if UNDER_TORCHRUN:
            here = hosts_of_torchrun() or int(os.environ["WORLD_SIZE"])
            exactly = (mark and mark.kwargs.get("exactly")) or isinstance(counts[0], Hosts) != isinstance(here, Hosts)
            counts = (here,) if here in counts or not exactly else ()
        metafunc.parametrize("ranks", counts, indirect=True, ids=lambda count: f"{count}ranks")


@pytest.hookimpl(trylast=True)  # after -k, so that what it asks for is not left out
def pytest_collection_modifyitems(config, items):
    """Of a test with several parameters every value, but every combination only with IRIS_TEST_ALL=1, and on GPUs.

    There alone run tests, and cases of tests, that are marked `thorough`. Tests of equal size come side by side, so
    that few rank processes are alive at a time.
    """
    if SAMPLED:
        cases = {}
        for item in items:
            if item.get_closest_marker("thorough") is None:
                cases.setdefault((item.path, item.originalname), []).append(item)
        kept = {
            each[number] for each in cases.values() for number in few_that_show_all([_values(item) for item in each])
        }
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]

    def count(item):
        value = item.callspec.params.get("ranks", 0) if hasattr(item, "callspec") else 0
        if isinstance(value, Hosts):
            return (1, value)  # after those of one host
        return (0, value if isinstance(value, int) else 0)

    items.sort(key=count)


def _values(item):
    """The values of a test's parameters, by what they are: a combination has the same objects as others."""
    if not hasattr(item, "callspec"):
        return {()}
    together = [mark.args[0] for mark in item.iter_markers("parametrize")]
    together = [names.replace(",", " ").split() if isinstance(names, str) else names for names in together]
    params = item.callspec.params
    return {tuple((name, id(params[name])) for name in names) for names in [*together, set(params) & {"ranks"}]}


@pytest.fixture
def mistaken(monkeypatch):
    """For tests of programs that do wrong on purpose: the sanitizer, if it is on, does not look at them.

    Nor does it change the heap for them.
    """
    monkeypatch.delenv("IRIS_SANITIZE", raising=False)


@pytest.fixture
def iris_check(iris_check, monkeypatch):
    """The sanitizer's, with copies for the processes that it starts."""
    monkeypatch.setattr(sys, "executable", python()[0])
    monkeypatch.setenv("PYTHONPATH", import_path())
    return iris_check


@pytest.fixture(scope="session", autouse=True)
def _server_of_ranks(request):
    """Before any test: one may start ranks by itself, and they would be forked from another."""
    from iris import simulator

    takes_ranks = any("ranks" in getattr(item, "fixturenames", ()) for item in request.session.items)
    if takes_ranks and simulator.ACTIVE and not UNDER_TORCHRUN:
        RankPool.start_server()


@pytest.fixture(scope="session")
def _pools():
    pools = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def ranks(request, _pools):
    """Runs ``worker(ctx, *args)`` on every rank: ``ranks.run(worker, *args)`` returns a result a rank."""
    from iris import simulator

    count = request.param
    if not (UNDER_TORCHRUN or simulator.ACTIVE):
        pytest.fail("On GPUs ranks are started by torchrun: make test-gpu. With IRIS_SIMULATOR=1 they are simulated.")
    if count not in _pools:
        for pool in _pools.values():
            pool.close()
        _pools.clear()
        _pools[count] = Torchrun() if UNDER_TORCHRUN else RankPool(count)
    return _pools[count]
