"""The table of what each way can do is complete, and what a row refuses is said to who asks for it."""

import re
from types import SimpleNamespace

import pytest
import torch

from iris.errors import InvalidConfigError
from iris.ops import FusedConfig, algorithms
from iris.ops.algorithms import ALGORITHMS, asked
from iris.ops.call import OPERATIONS, Call
from iris.simulator import ACTIVE

ROWS = {each.name: each for each in ALGORITHMS}
DOCUMENTED = re.findall(r"^\| `(\w+)` \| (.*?) \| .*? \| (yes|no) \|", algorithms.__doc__, re.MULTILINE)
ASKED = {
    "vendor": {"variant": "vendor"},
    "copies": {"variant": "copies"},
    "hopper": {"use_gluon": True, "block_size_m": 128},
    "cdna3": {"use_gluon": True, "block_size_m": 128},
    "triton": {},
}


def given(operation, dtype=torch.bfloat16, size=2, scale=None):
    """A call of 64 rows, or of so many for each rank, that every algorithm carries; nobody touches its memory."""
    rows = {"all_gather_matmul": 64 * size, "matmul_all_gather": 64 * size, "matmul_reduce_scatter": 64 // size}
    out, a, b = (rows.get(operation, 64), 64), (64, 64), (64 * size if operation == "all_gather_matmul_k" else 64, 64)
    return Call(operation, *(torch.empty(shape, dtype=dtype) for shape in (out, a, b)), None, scale, None)


def operations(words):
    """Those that a cell of the table names."""
    if words.startswith("all but "):
        return tuple(each for each in OPERATIONS if each not in words.removeprefix("all but ").split(", "))
    return OPERATIONS if words == "all" else tuple(words.split(", "))


def test_the_docstring_has_each_row():
    assert {name: operations(words) for name, words, _ in DOCUMENTED} == {
        name: row.operations for name, row in ROWS.items()
    }
    assert len(ROWS) == len(ALGORITHMS) == len(DOCUMENTED)


@pytest.mark.parametrize("name, workspace", [(name, workspace) for name, _, workspace in DOCUMENTED])
def test_each_row_carries_its_operations(name, workspace):
    """With the memory that the table says, and no other operation."""
    communicator = SimpleNamespace(alike=False, num_sms=4)
    ccl = SimpleNamespace(communicator=lambda: communicator)
    row = ROWS[name](SimpleNamespace(num_ranks=2, cur_rank=0, is_symmetric=lambda tensor: False, ccl=ccl))
    config = FusedConfig(**ASKED[name])
    if not ACTIVE and name in ("hopper", "cdna3") and row.limit(given("matmul_all_gather"), config):
        pytest.skip("not for this GPU")
    for operation in OPERATIONS:
        call = given(operation)
        assert (row.problem(call, config) is None) == (operation in row.operations)
        if operation in row.operations:
            needs = row.needs(call, config)
            assert (needs is None) == (workspace == "no")
            assert needs is None or needs.kind[0] == operation and needs.elements


@pytest.mark.parametrize("hip", [None, "7.0"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_a_configuration_asks_for(operation, hip, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    call = given(operation)
    for name, fields in ASKED.items():
        if name != ("hopper" if hip else "cdna3"):
            assert asked(call, FusedConfig(**fields)) == name
    by_collective = "vendor" if operation == "matmul_all_reduce" else "triton"
    assert asked(call, FusedConfig(all_reduce_variant="ring")) == by_collective
    assert asked(call, FusedConfig(variant="copies", all_reduce_variant="ring")) == "copies"


def refuse(ctx, operation, fields, words, dtype, scaled):
    call = given(operation, dtype, ctx.num_ranks, torch.ones(1) if scaled else None)
    call = call._replace(**{role: getattr(call, role).to(ctx.device) for role in ("out", "a", "b")})
    call = call._replace(scale_a=call.scale_a.to(ctx.device)) if scaled else call
    config = FusedConfig(**fields)
    problem = ctx.ops._algorithms[asked(call, config)].problem(call, config)
    gather = {"gather_dim": "k"} if operation == "all_gather_matmul_k" else {}
    name, tensors = operation.removesuffix("_k"), (call.out, call.a, call.b)
    for method in (name, f"{name}_preamble"):
        with pytest.raises(InvalidConfigError, match=words) as error:
            getattr(ctx.ops, method)(*tensors, scale_a=call.scale_a, config=config, **gather)
        assert str(error.value) == problem


@pytest.mark.parametrize(
    ("operation", "fields", "words", "dtype", "scaled"),
    [
        ("all_gather_matmul", {"variant": "vendor"}, "variant='vendor'.*scales are for fp8", torch.bfloat16, True),
        ("all_gather_matmul", {"variant": "copies"}, "variant='copies'.*scales are for fp8", torch.bfloat16, True),
        ("matmul_all_reduce", {"all_reduce_variant": "ring"}, "all_reduce_variant='ring'.*fp8", torch.bfloat16, True),
        ("matmul_all_reduce", {"variant": "vendor", "all_reduce_variant": "ring"}, "variant='ring'", torch.half, True),
        ("matmul_all_reduce", {"variant": "copies"}, "and not for matmul_all_reduce", torch.half, False),
        ("matmul_all_gather", {"variant": "vendor", "use_gluon": True}, "the kernel is in Gluon", torch.half, False),
        ("all_gather_matmul", {"variant": "copies", "use_gluon": True}, "variant='copies' takes", torch.half, False),
        ("all_gather_matmul_k", {"use_gluon": True}, "gather_dim='k'.*its kernel is in Triton", torch.half, False),
        ("matmul_all_gather", ASKED["hopper"], "of one dtype, fp16 or bf16", torch.float32, False),
    ],
)
def test_what_a_row_refuses(ranks, operation, fields, words, dtype, scaled):
    ranks.run(refuse, operation, fields, words, dtype, scaled)
