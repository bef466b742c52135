"""Kernels of expert parallelism for few tokens: no fence, loads and stores of 16 bytes, nothing in local memory."""

import itertools
import re

import pytest
from covering import EVERYTHING

from codegen import test_every_kernel as every
from codegen.expert_arguments import few, forms
from codegen.offline import by_turns, compile_for, one_of_each
from codegen.test_expert_kernels import FORMS, WEIGHTS, wide
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
    return every.arguments_of(dispatch, **given, EXTENTS=few(target, tokens))


def weighted(name, target, tokens):
    return every.arguments_of(combine, WEIGHTS=WEIGHTS[name].value, EXTENTS=few(target, tokens))


def cases(target):
    """(name, kernel, arguments, options) of all."""
    for tokens in TOKENS:
        for form in FORMS:
            yield f"dispatch {form}, {tokens} tokens", dispatch, of_form(form, target, tokens), options(target, tokens)
        for name in WEIGHTS:
            yield f"combine {name}, {tokens} tokens", combine, weighted(name, target, tokens), options(target, tokens)


# Each form and each way of weights with the other number of tokens by turns; with both in `make test-all`.
KINDS = len(FORMS) + len(WEIGHTS)
NUMBERS = range(2 * KINDS) if EVERYTHING else [kind + KINDS * (kind // 2 % 2) for kind in range(KINDS)]


@pytest.mark.parametrize(("target", "number"), one_of_each(TARGETS, NUMBERS))
def test_messages_need_no_fence(target, number):
    name, kernel, arguments, given = next(itertools.islice(cases(target), number, None))
    text = compile_for(target, kernel, *arguments, **given).text
    # Names of files come without.
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith((".loc", ".file")))
    # Of acquires and releases at system scope, too.
    ordered = r"fence|membar|\.(release|acquire|acq_rel)\b" if target.startswith("sm") else r"buffer_(wbl2|inv)"
    assert not re.search(ordered, code)
    # There are as many bytes of a row of fp8 as threads have halves of 16 bytes.
    assert wide(code, "store", target) and (wide(code, "load", target) or "given by" in name)


# The assembler takes seconds for each: in `make test` one by each Triton, for dispatch and for combine.
@pytest.mark.parametrize("number", by_turns(NUMBERS if EVERYTHING else [NUMBERS[0], NUMBERS[-1]]))
def test_nothing_is_spilled(number):
    _, kernel, arguments, given = next(itertools.islice(cases("sm_90"), number, None))
    instructions = compile_for("sm_90", kernel, *arguments, **given).instructions()
    assert not [line for line in instructions if re.search(r"\b(LDL|STL)\b", line)]
