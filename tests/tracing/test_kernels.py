"""What the library's kernels record of themselves."""

import os
import subprocess

import pytest
from conftest import TESTS, UNDER_TORCHRUN, import_path
from covering import EVERYTHING
from preloaded import LIMIT_S, python

from iris import simulator

COLLECTIVES, OPERATIONS = "traced_collectives.py", "traced_operations.py"
# With how many ranks, and how many ways there are.
SAMPLE = [(COLLECTIVES, "2", 15)]
MORE = [(COLLECTIVES, "3", 17), (COLLECTIVES, "4", 17), *((OPERATIONS, number, 7) for number in "234")]


@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own; run it without torchrun")
@pytest.mark.skipif(not simulator.ACTIVE, reason="its program has as many ranks as it pleases")
@pytest.mark.parametrize(("program", "count", "ways"), [*SAMPLE, *(MORE if EVERYTHING else [])])
def test_every_way_of_every_operation_tells_what_it_moves(program, count, ways):
    environment = {**os.environ, "IRIS_TRACE": "1", "PYTHONPATH": import_path()}
    done = subprocess.run(
        [*python(), TESTS / "programs" / program, count],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{ways} ways among {count} ranks move what they say.\n"
