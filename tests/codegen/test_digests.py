"""Digests see instructions and nothing else, and those of a sample of kernels are the stored ones.

All kernels, for all targets: ``python scripts/digests.py``.
"""

import json
import runpy
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from codegen.cases import cases
from codegen.digest import digest, instructions
from codegen.offline import OLDEST, assembly_for, compile_for
from iris import DeviceContext

COMMAND = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "digests.py"))
DATA, CONTEXT = torch.zeros(4096), torch.zeros(16, dtype=torch.int64)
# Small kernels, of each floor one: they take a second each.
SAMPLE = [
    "iris/runtime/device_barrier.py:_barrier_kernel",
    "iris/ccl/one_hop.py:one_hop",
    "x gather",
    "device gluon put_signal",
    "device triton everything traced",
]


@triton.jit
def plain(context_tensor, source, target, n, BLOCK: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = ctx.load(source + i, 1, mask=i < n)
    ctx.store(target + i, value + 1.0, 1, mask=i < n)


@triton.jit
def named_in_another_way(context, origin, destination, length, SIZE: tl.constexpr):
    """The same, told in other words."""
    device = DeviceContext.initialize(context)

    # Where this program's elements are.
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)

    read = device.load(origin + places, 1, mask=places < length)  # of a peer
    device.store(destination + places, read + 1.0, 1, mask=places < length)


@triton.jit
def of_other_instructions(context_tensor, source, target, n, BLOCK: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = ctx.load(source + i, 1, mask=i < n)
    ctx.store(target + i, value + 2.0, 1, mask=i < n)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_digest_is_of_instructions_and_of_no_names(target):
    texts = [
        compile_for(target, kernel, CONTEXT, DATA, DATA, 4096, 1024).text
        for kernel in (plain, named_in_another_way, of_other_instructions)
    ]
    first, renamed, changed = map(digest, texts)
    assert first == renamed != changed
    assert texts[0] != texts[1]
    # Whatever a program says in its instructions is still there.
    words = {"sm_90": ["ld.global.v4.b32", "st.global.v4.b32"], "gfx942": ["global_load_dwordx4", "s_endpgm"]}[target]
    assert all(any(word in line for line in instructions(texts[0])) for word in words)
    assert digest(assembly_for(target, plain, CONTEXT, DATA, DATA, 4096, 1024)) == first


PTX = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid 128
{
	.reg .b32 %r<3>;
	.loc	1 3 0 // kernel.py:3:0
$L__func_begin0:
	ld.param.b64 	%rd1, [kernel_param_0];
	{
	.reg .pred ready;
	.shared .align 16 .b8 meeting[16];
	setp.eq.u32 ready, %r1, 0; // is it there?
	@ready st.relaxed.sys.global.b32 [%rd1], 7;
	}
$L__BB0_1:
	mov.b32 %r2, global_smem;
	bra $L__BB0_1;
}
	.file	1 "kernel.py"
	.section	.debug_str
	{
	.b8 107
	}
"""
GCN = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
	.globl	add_one                  ; -- Begin function add_one
	.type	add_one,@function
add_one:                                 ; @add_one
.Lfunc_begin0:
	.loc	1 3 0                   ; kernel.py:3:0
	s_load_dwordx2 s[2:3], s[0:1], 0x0
.LBB0_1:
	global_store_dword v0, v1, s[2:3] sc0 sc1 ; is it there?
	s_branch .LBB0_1
	.section	.rodata,"a",@progbits
	.amdhsa_kernel add_one
		.amdhsa_next_free_vgpr 16
	.end_amdhsa_kernel
	.text
	.size	add_one, .Lfunc_end0-add_one
	.set add_one.num_vgpr, 16
	.set .Ladd_one.num_agpr, 0
	.section	.debug_str,"MS",@progbits,1
	.asciz	"source"
	.section	".note.GNU-stack","",@progbits
	.amdgpu_metadata
---
    .args:
      - .name: source
...
	.end_amdgpu_metadata
"""
NO_INSTRUCTIONS = [
    *((PTX, *each) for each in [("kernel", "other"), ("ready", "p"), ("meeting", "m"), ("there", "here")]),
    *((PTX, *each) for each in [("1 3 0", "1 4 0"), ("107", "108"), ("8.7", "9.0"), ("L__func_begin0", "L__tmp5")]),
    *((GCN, *each) for each in [("add_one", "other"), ("there", "here"), ("1 3 0", "1 4 0"), ("source", "origin")]),
]
INSTRUCTIONS = [
    *((PTX, *each) for each in [("relaxed", "release"), (".sys", ".gpu"), ("], 7", "], 8"), ("@ready", "@!ready")]),
    *(
        (PTX, *each)
        for each in [(".reqntid 128", ".reqntid 256"), ("param_0", "param_1"), ("r2, global_smem", "r2, 0")]
    ),
    *((PTX, *each) for each in [("bra $L__BB0_1", "bra $L__BB0_2"), ("meeting[16]", "meeting[32]")]),
    *((GCN, *each) for each in [(" sc0 sc1", " sc1"), ("0x0", "0x8"), ("v0, v1", "v1, v0"), ("vgpr 16", "vgpr 17")]),
]


@pytest.mark.parametrize(("text", "before", "after"), NO_INSTRUCTIONS)
def test_what_a_digest_does_not_see(text, before, after):
    assert before in text and digest(text.replace(before, after)) == digest(text)


@pytest.mark.parametrize(("text", "before", "after"), INSTRUCTIONS)
def test_what_a_digest_sees(text, before, after):
    assert before in text and digest(text.replace(before, after)) != digest(text)


def test_how_kernels_differ_from_those_that_are_stored():
    stored = {"same": "1", "altered": "2", "old name": "3", "removed": "4", "of AMD": "only gfx942", "broken": "5"}
    found = {"same": "1", "altered": "6", "new name": "3", "added": "7", "broken": "does not compile: why"}
    assert COMMAND["differences"](stored, found) == {
        "changed": ["altered"],
        "renamed": ["old name -> new name"],
        "new": ["added"],
        "gone": ["of AMD", "removed"],
        "failed": ["broken does not compile: why"],
    }


def test_only_what_was_looked_at_is_reported_and_stored(tmp_path, capsys):
    file = tmp_path / "digests" / "stored.json"
    assert not COMMAND["report"](file, {"a push": "1", "a pull": "2"}, "", write=False)
    assert not file.exists()
    assert not COMMAND["report"](file, {"a push": "1", "a pull": "2"}, "", write=True)
    assert not COMMAND["report"](file, {"a push": "1"}, "push", write=False)
    assert COMMAND["report"](file, {"a push": "3"}, "push", write=False)
    assert "changed: a push" in capsys.readouterr().out
    assert COMMAND["report"](file, {}, "push", write=False)
    assert COMMAND["report"](file, {"a push": "does not compile: why"}, "push", write=True)
    assert not COMMAND["report"](file, {"a push": "1"}, "push", write=True)
    assert not COMMAND["report"](file, {"a push": "3"}, "push", write=True)
    assert json.loads(file.read_text()) == {"a pull": "2", "a push": "3"}


def test_a_sample_has_the_stored_digests():
    file = COMMAND["STORED"] / f"{triton.__version__}-sm_90.json"
    if not file.exists() and not OLDEST:
        pytest.skip(f"no digests are stored for Triton {triton.__version__}: python scripts/digests.py --write")
    stored = json.loads(file.read_text())
    sample = [case for case in cases("sm_90", {}) if case.name in SAMPLE]
    assert len(sample) == len(SAMPLE)
    found = {case.name: digest(assembly_for("sm_90", case.kernel, *case.arguments, **case.options)) for case in sample}
    assert found == {name: stored[name] for name in SAMPLE}
