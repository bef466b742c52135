"""What kernels tell the host, and which waits end with it: with IRIS_DEBUG=1, pointers not in their context's heap."""

import os
import subprocess

import pytest
import torch
import triton
import triton.language as tl
from conftest import TESTS, UNDER_TORCHRUN, import_path
from preloaded import LIMIT_S, python

from iris.failures.device_record import KIND, KINDS, SIZE
from iris.language.failures import expired, kind_code, nanoseconds, write_record


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
    """Whether a wait whose limit is not over ends behind a record of this kind, and behind that of a wait as well."""
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
