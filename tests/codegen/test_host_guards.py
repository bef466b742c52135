"""Accesses by a context that spans hosts: compiled for a GPU, what would go to another host is masked out and recorded.

The type of the context's table says whether it spans hosts (`iris.language.context_tensor.table_type`). With one host
nothing is left of it, which the digests show (tests/codegen/test_digests.py).
"""

import itertools

import pytest
import torch
from covering import EVERYTHING, covering, sample
from language import atomic_kernels
from language.test_atomics import CASES, ORDERS
from test_hosts import HOW, reach_kernel

from codegen import device_kernels as kernels
from codegen.offline import TARGETS, compile_for
from codegen.operations import releases
from codegen.test_generated_code import FORMS, access, data_accesses
from iris.language.context_tensor import table_type

ONE_HOST = torch.zeros(16, dtype=torch.int64)
SEVERAL = ONE_HOST.view(table_type([1, 0], torch.device("cuda")))


def writes_a_record(compiled):
    """A record is claimed by a maximum, which nothing else in these kernels takes."""
    return any("atom" in line and "max" in line for line in compiled.text.splitlines())


def test_the_type_of_a_table_says_whether_it_spans_hosts():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [table_type(bases, device) for device in (gpu, cpu) for bases in ([64, 128], [64, 0])] == [
        *(torch.int64, torch.uint64),
        *(torch.int64, torch.int64),
    ]


@pytest.mark.parametrize(("target", "how"), covering(TARGETS, [*HOW, "masked"]))
def test_every_access_is_guarded_where_a_context_spans_hosts(target, how):
    data = torch.zeros(64, dtype=torch.int32)
    one, several = (
        compile_for(target, reach_kernel, table, table, data, data, data, 1, how) for table in (ONE_HOST, SEVERAL)
    )
    assert writes_a_record(several) and not writes_a_record(one)


@pytest.mark.parametrize(
    ("target", "form", "masked"),
    covering(TARGETS, FORMS, [False, True]),
)
def test_guarded_accesses_are_as_wide_as_others(target, form, masked):
    kernel, (_, *arguments) = access(form, torch.float32, masked)
    one, several = (compile_for(target, kernel, table, *arguments) for table in (ONE_HOST, SEVERAL))
    wide, others = data_accesses(one), data_accesses(several)
    assert writes_a_record(several)
    assert all(others.count(operation) >= wide.count(operation) for operation in wide)
    # An element at a time. AMD's compiler writes the record's words, which have 8 bytes, in fours of these.
    assert not {"ld.global.b32", "st.global.b32", "global_load_dword", "global_store_dword"} & set(others)


@pytest.mark.parametrize(("target", "language"), covering(TARGETS, ["triton", "gluon"]))
def test_a_guarded_signal_is_a_release(target, language):
    flag, kernel = torch.zeros(16, dtype=torch.int32), getattr(kernels, f"{language}_signal_wait")
    compiled = compile_for(target, kernel, SEVERAL, torch.zeros(4096), flag, 7, 1, 1024, "signal")
    assert writes_a_record(compiled) and releases(compiled.operations())


FORMS_OF_ATOMICS = ["triton_context", "triton_functional", "gluon_context", "gluon_functional"]


def guarded_atomics():
    """Every fourth of those that `test_generated_code` compiles without guards; in `make test-all` as many."""
    cases = zip(sample(FORMS_OF_ATOMICS, CASES), itertools.cycle(ORDERS), strict=False)
    return [(*chosen, order) for chosen, order in cases][:: 1 if EVERYTHING else 4]


@pytest.mark.parametrize(("form", "case", "order"), guarded_atomics())
def test_guarded_atomics_compile(form, case, order):
    operation, dtype = case
    data = torch.zeros(64, dtype=torch.uint8).view(dtype)
    arguments = (SEVERAL, SEVERAL, data, data, data, 300, 0, 1, operation, *order, 128)
    assert writes_a_record(compile_for("sm_90", getattr(atomic_kernels, form), *arguments))
