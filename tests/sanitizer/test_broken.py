"""Every broken program is found, for what it is and where it is; no corrected twin is reported."""

import contextlib
import importlib
import re
import sys
from pathlib import Path

import pytest
from covering import thorough

from iris.errors import IrisError

BROKEN = Path(__file__).parent / "broken"
SOURCES = {path.stem: path.read_text() for path in sorted(BROKEN.glob("*.py")) if path.name != "program.py"}


def expected_kind(name):
    return re.search(r'^KIND = "(.+)"$', SOURCES[name], re.MULTILINE).group(1)


def ranks_of(name):
    found = re.search(r"^RANKS = (\d+)$", SOURCES[name], re.MULTILINE)
    return int(found.group(1)) if found else 2


def marked_lines(name):
    """Where a report must point."""
    lines = enumerate(SOURCES[name].splitlines(), start=1)
    return {f"{name}.py:{number}" for number, line in lines if re.search(r"# (first|second)$", line)}


def work(ctx, name, broken):
    sys.path.insert(0, str(BROKEN))
    try:
        importlib.import_module(name).main(ctx, broken)
    except IrisError:
        if not broken:
            raise
        # Ranks that did not fail are in the barrier at the program's end.
        with contextlib.suppress(IrisError):
            ctx.barrier()
    finally:
        sys.path.remove(str(BROKEN))


# What ranks disagree about what is on their heap, no later program could use: see `test_check`.
ON_ONE_HEAP = [name for name in SOURCES if expected_kind(name) != "asymmetric"]


def of(num_ranks, names):
    return [name for name in names if ranks_of(name) == num_ranks]


def third(names):
    """Every third is in the sample, since each is like the others: nothing is found."""
    return [thorough(name) if number % 3 else name for number, name in enumerate(names)]


def check_broken(ranks, name):
    _, findings = ranks.run_sanitized(work, name, True)
    assert {finding.kind for finding in findings} == {expected_kind(name)}
    named = [
        {Path(line).name for _, where in finding.places for line in re.findall(r"\S+\.py:\d+", where)}
        for finding in findings
    ]
    assert any(marked_lines(name) <= places for places in named), findings


def check_corrected(ranks, name):
    _, findings = ranks.run_sanitized(work, name, False)
    assert findings == []


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", of(2, ON_ONE_HEAP))
def test_broken(ranks, name):
    check_broken(ranks, name)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", of(3, ON_ONE_HEAP))
def test_broken_of_three(ranks, name):
    check_broken(ranks, name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", third(of(2, SOURCES)))
def test_corrected(ranks, name):
    check_corrected(ranks, name)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", third(of(3, SOURCES)))
def test_corrected_of_three(ranks, name):
    check_corrected(ranks, name)


def test_every_kind_is_broken_more_than_once():
    kinds = [expected_kind(name) for name in SOURCES]
    assert len(kinds) >= 30
    for kind in ("race", "race/missing-release", "race/missing-acquire", "race/scope", "race/reuse", "bounds", "freed",
                 "uninitialised", "deadlock", "asymmetric", "rank"):  # fmt: skip
        assert kinds.count(kind) > 1, kind
