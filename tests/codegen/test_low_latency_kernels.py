"""Kernels of expert parallelism for few tokens: no fence, wide loads and stores, nothing in local memory."""

import itertools
import re

import pytest
from covering import EVERYTHING

from codegen import test_every_kernel as every
from codegen.collective_arguments import INT32
from codegen.expert_arguments import COUNTED, TWO_BIASES, few, forms
from codegen.offline import compile_for, one_of_each
from codegen.test_expert_kernels import FORMS, PHASES, WEIGHTS, wide
from iris.ccl.kernel_launch import leaving_room
from iris.experts.low_latency.combine import combine
from iris.experts.low_latency.dispatch import dispatch

# Not CDNA3: `iris.experts.low_latency.memory.possible`.
TARGETS = ("sm_90", "sm_100", "gfx950")
# Of a rank: programs that share a token, and such as have one each.
TOKENS = (8, 128)


def options(target, tokens):
    """As a launch has them."""
    threads = few(target, tokens).THREADS
    return {"num_warps": threads // 64} if target == "gfx950" else {"num_warps": threads // 32, **leaving_room(threads)}


def of_form(form, target, tokens):
    given = dict(forms(target).get(form, {}))
    given.pop("slot", None)
    if "scales" in given:
        given["scales"] = given["scales"]._replace(sent=None)
    return dispatched(target, tokens, **given)


def combined(target, tokens, **given):
    return every.arguments_of(combine, **given, EXTENTS=few(target, tokens))


def dispatched(target, tokens, **given):
    return every.arguments_of(dispatch, **given, EXTENTS=few(target, tokens))


def cases(target):
    """(name, kernel, arguments, options) of all."""
    for tokens in TOKENS:
        launched = options(target, tokens)
        for form in FORMS:
            yield f"dispatch {form}, {tokens} tokens", dispatch, of_form(form, target, tokens), launched
        for name, weights in WEIGHTS.items():
            given = combined(target, tokens, WEIGHTS=weights.value)
            yield f"combine {name}, {tokens} tokens", combine, given, launched
    for tokens in TOKENS:
        launched = options(target, tokens)
        for name, arguments in (
            ("of a number on the device", {"num_tokens": INT32}),
            ("with statistics", {"statistics": COUNTED}),
            *((name, {"PHASE": phase}) for name, phase in PHASES.items()),
        ):
            yield f"dispatch {name}, {tokens} tokens", dispatch, dispatched(target, tokens, **arguments), launched
        for name, arguments in (
            ("with two biases", {"WEIGHTS": WEIGHTS["dispatched"].value, "bias": TWO_BIASES}),
            ("with statistics", {"statistics": COUNTED}),
            *((name, {"PHASE": phase}) for name, phase in PHASES.items()),
        ):
            yield f"combine {name}, {tokens} tokens", combine, combined(target, tokens, **arguments), launched


def bytes_at_a_time(rows, extents):
    """By a thread, of the columns that its program moves at a time: 16, or fewer where these are not enough."""
    return extents.BLOCK * rows.element_size() // extents.THREADS


def numbers():
    """Of all cases; of the sample those of every second kind with the other number of tokens by turns."""
    every_number = range(sum(1 for _ in cases("sm_90")))
    if EVERYTHING:
        return every_number
    plain = len(FORMS) + len(WEIGHTS)
    others = len(every_number) // len(TOKENS) - plain
    chosen = [kind + plain * (kind // 2 % 2) for kind in range(plain)]
    chosen += [len(TOKENS) * plain + kind + others * (kind // 2 % 2) for kind in range(others)]
    return chosen[::2]


@pytest.mark.parametrize(("target", "number"), one_of_each(TARGETS, numbers()))
def test_messages_need_no_fence_and_nothing_is_spilled(target, number):
    name, kernel, arguments, launched = next(itertools.islice(cases(target), number, None))
    compiled = compile_for(target, kernel, *arguments, **launched)
    # Names of files come without.
    lines = [line for line in compiled.text.splitlines() if not line.lstrip().startswith((".loc", ".file"))]
    code = "\n".join(lines)
    # Of acquires and releases at system scope, too.
    ordered = r"fence|membar|\.(release|acquire|acq_rel)\b" if target.startswith("sm") else r"buffer_(wbl2|inv)"
    assert not re.search(ordered, code)
    given = dict(zip(kernel.arg_names, arguments, strict=True))
    rows = (given["x"], given["layout"].rows) if kernel is dispatch else (given["y"], given["out"])
    for way, moved in zip(("load", "store"), rows, strict=True):
        assert wide(code, way, target, bytes_at_a_time(moved, given["EXTENTS"])), (name, way)
    if target == "sm_90":
        assert not [line for line in compiled.instructions() if re.search(r"\b(LDL|STL)\b", line)], name
