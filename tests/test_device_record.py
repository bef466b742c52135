"""What kernels tell the host, and which waits end with it: with IRIS_DEBUG=1, pointers not in their context's heap."""

import os
import subprocess

import pytest
import torch
import triton
import triton.language as tl
from conftest import TESTS, UNDER_TORCHRUN, import_path
from preloaded import LIMIT_S, python

from iris.failures.device_record import CLOCK, KIND, KINDS, SIZE
from iris.language.failures import (
    POLLS_WITHOUT_CLOCK,
    exceeded,
    expired,
    kind_code,
    nanoseconds,
    untimed,
    write_record,
)


@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own; run it without torchrun")
def test_a_kernel_that_reaches_a_peer_by_a_foreign_pointer_is_reported():
    environment = {**os.environ, "IRIS_DEBUG": "1", "PYTHONPATH": import_path(TESTS)}
    program = TESTS / "programs" / "reach_elsewhere.py"
    result = subprocess.run([*python(), program], env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr
    assert "FAILED" not in result.stdout, result.stdout
    assert result.stdout.count("found:") == 2 * 6 and result.stdout.count("done") == 2


@triton.jit
def claim_kernel(record, ends, KIND_OF_RECORD: tl.constexpr):
    """Whether a wait whose limit is not over ends after a record of this kind, and after that of a wait as well."""
    write_record(record, record, 0, 0, kind_code(KIND_OF_RECORD), 0, 0)
    tl.store(ends, expired(record, nanoseconds(record) + (1 << 50)).to(tl.int32))
    write_record(record, record, 0, 0, kind_code("queue"), 0, 0)
    tl.store(ends + 1, expired(record, nanoseconds(record) + (1 << 50)).to(tl.int32))


def claim(ctx):
    for kind in KINDS:
        record, ends = (torch.zeros(SIZE, dtype=dtype, device=ctx.device) for dtype in (torch.int64, torch.int32))
        claim_kernel[(1,)](record, ends, kind)
        # Messages of unequal size, and what a root has refused, leave other waits what they wait for.
        assert ends.tolist()[:2] == [kind not in ("size", "refused"), 1], kind
        assert KINDS[record[KIND]] == kind


@pytest.mark.ranks(1)
def test_what_is_noted_ends_no_other_wait(ranks):
    ranks.run(claim)


@triton.jit
def poll_kernel(record, over, polls):
    """Polls in vain, so many times; the limit is 0 here, so that any time is too long."""
    since, passed = untimed(), False
    for _ in range(polls):
        passed, since = exceeded(record, since)
    tl.store(over, passed)


def poll(ctx):
    for more, looked, too_long in ((-1, False, False), (0, True, False), (1, True, True)):
        record = torch.zeros(SIZE, dtype=torch.int64, device=ctx.device)
        over = torch.zeros(1, dtype=torch.int32, device=ctx.device)
        poll_kernel[(1,)](record, over, POLLS_WITHOUT_CLOCK.value + more)
        assert (record[CLOCK].item() > 0, over.item()) == (looked, too_long), more


@pytest.mark.ranks(1)
def test_a_wait_looks_at_the_clock_after_many_polls_in_vain(ranks):
    ranks.run(poll)
