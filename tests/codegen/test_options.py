"""Cache modifiers, hints and masks of the context's operations are in the generated code; what they do not take."""

import re

import pytest
import torch
from covering import covering
from language import atomic_kernels, mistaken_kernels, option_kernels
from triton.compiler.errors import CompilationError

from codegen.offline import compile_for
from iris.errors import IrisError

CONTEXT = torch.zeros(16, dtype=torch.int64)
# The words of the access on NVIDIA and on AMD; None where some version of Triton takes the modifier for none.
LOADS = {".ca": (".ca", None), ".cg": (".cg", "nt"), ".cv": (None, "sc0 sc1")}
STORES = {".cg": (".cg", None), ".cs": (".cs", "nt"), ".wt": (".wt", "sc0 sc1")}
READS, WRITES = ("load", "get", "put", "copy"), ("store", "get", "put", "copy")


def move(language, operation, load, store, hint):
    """A kernel that does this operation so, and its arguments."""
    data = torch.zeros(4096, dtype=torch.float16 if operation == "add" else torch.float32)
    return getattr(option_kernels, f"{language}_moves"), (CONTEXT, data, data, 7, 1, operation, load, store, hint, 1024)


def compiled(target, *of_move):
    kernel, arguments = move(*of_move)
    return compile_for(target, kernel, *arguments).text


def accesses(text, kind):
    return re.findall(rf"^\s*(?:@\S+\s+)?((?:{kind})[^;\n]*)", text, re.M)


CASES = covering(["triton", "gluon"], [*READS, "store"], LOADS, STORES)
HINTED = covering(["triton", "gluon"], ["load", "store", "get", "put", "copy", "add"])


@pytest.mark.parametrize(("language", "operation", "load", "store"), CASES)
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_cache_modifier_is_that_of_the_access(target, language, operation, load, store):
    on_amd = target != "sm_90"
    text = compiled(target, language, operation, load, store, None)
    read = accesses(text, "(?:global|buffer)_load" if on_amd else r"ld\.global")
    written = accesses(text, "(?:global|buffer)_store" if on_amd else r"st\.global")
    for words, found, here in ((LOADS[load], read, READS), (STORES[store], written, WRITES)):
        if operation in here and words[on_amd]:
            assert any(words[on_amd] in access for access in found), found


@pytest.mark.parametrize(("language", "operation"), HINTED)
def test_a_hint_makes_accesses_of_a_peer_wide(language, operation):
    """On NVIDIA; for AMD's Gluon the layout alone says how wide an access is."""
    peers = r"ld\.global\.cg|st\.global\.wt|(?:red|atom)\.global"
    for hint, wide in ((None, False), (16, True)):
        found = accesses(compiled("sm_90", language, operation, ".cg", ".wt", hint), peers)
        assert any(re.search(r"\.v4\.b32|\.v8\.f16", access) for access in found) == wide, found


@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_a_compare_and_swap_takes_a_hint(language):
    assert re.search(r"atom\.\S+\.cas\.", compiled("sm_90", language, "cas", None, None, 16))


@pytest.mark.parametrize("mask", [None, True])
@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_an_atomic_takes_one_mask_for_a_block(language, mask):
    kernel = getattr(atomic_kernels, f"{language}_one_mask")
    text = compile_for("sm_90", kernel, CONTEXT, torch.zeros(128, dtype=torch.int32), 1, 3, mask).text
    assert re.search(r"(?:red|atom)\.\S*add", text)


@pytest.mark.parametrize("what", mistaken_kernels.MISTAKES)
def test_arguments_of_other_types_are_said_in_words(what):
    with pytest.raises(CompilationError) as caught:
        compile_for("sm_90", mistaken_kernels.store, CONTEXT, CONTEXT[2:], torch.zeros(1), what)
    reason = caught.value
    while reason.__cause__:
        reason = reason.__cause__
    assert isinstance(reason, IrisError) and re.match(mistaken_kernels.MISTAKES[what], str(reason))
