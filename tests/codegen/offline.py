"""Compiling a kernel for a GPU that is not there, with the argument specialisation of a real launch."""

import functools
import itertools
import re
import tempfile

import torch
import triton
from covering import EVERYTHING
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.tools.disasm import get_sass

from codegen.barrier_memory import used_otherwise
from codegen.converted_pairs import widened_and_used

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
# Those of `make test`, which leaves Blackwell to `make test-all`.
SAMPLED = tuple(target for target in TARGETS if EVERYTHING or target != "sm_100")
OLDEST = triton.__version__.startswith("3.6.")


def targets_by_turns(number):
    """The targets of the kernel of this number: all of them in `make test-all`.

    Otherwise one: sm_90 for every second kernel, by turns one of AMD's for half of the others, by the newest Triton;
    and sm_90 by the oldest for the rest.
    """
    if EVERYTHING:
        return list(TARGETS)
    if OLDEST:
        return ["sm_90"] if number % 4 == 2 else []
    return (["gfx942"], ["sm_90"], [], ["sm_90"], ["gfx950"], ["sm_90"], [], ["sm_90"])[number % 8]


def by_turns(cases):
    """Every fourth of them by the oldest Triton, and as many by the newest; all of them in `make test-all`."""
    return cases if EVERYTHING else cases[0 if OLDEST else 1 :: 4]


def one_of_each(targets, cases):
    """(target, case): each with each in `make test-all`.

    Otherwise half of the cases: every fourth by the newest Triton for sm_90, and of the others by turns one by the
    newest for one of AMD's targets, and one by the oldest for sm_90.
    """
    if EVERYTHING:
        return [*itertools.product(targets, cases)]
    if OLDEST:
        return [("sm_90", case) for case in cases[6::8]]
    amd = [target for target in targets if target.startswith("gfx")]
    by_amd = zip(itertools.cycle(amd), cases[1::8], strict=False)
    return [*(("sm_90", case) for case in cases[::4]), *by_amd]


class OfflineDriver(DriverBase):
    """Answers what Triton asks a driver while it compiles; nothing can be launched."""

    def __init__(self, target):
        self._target = target

    @classmethod
    def is_active(cls):
        return False

    def map_python_to_cpp_type(self, ty):
        return "void*"

    def get_current_target(self):
        return self._target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        raise RuntimeError("there is no GPU to time on")

    def get_empty_cache_for_benchmark(self):
        raise RuntimeError("there is no GPU to time on")

    def clear_cache(self, cache):
        raise RuntimeError("there is no GPU to time on")


class Compiled:
    """A kernel's generated code: ``text`` in the target's assembly, ``ttgir`` before that; bytes of shared memory."""

    def __init__(self, compiled):
        self._compiled = compiled
        self.text = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
        self.ttgir = compiled.asm["ttgir"]
        self.is_ptx = "ptx" in compiled.asm
        self.shared = compiled.metadata.shared

    def instructions(self):
        """Those that an NVIDIA GPU runs, in their order: its own assembler moves what PTX has."""
        text = self._compiled.asm["sass"] if self._compiled.asm["cubin"] else _disassembled(self._compiled.hash)
        return [line for line in text.splitlines() if line.rstrip().endswith(";")]

    def operations(self):
        """The memory operations, fences and block barriers, in the order of the text."""
        ptx = r"(?:ld|st|atom|red)\.global[\w.:]*|(?:ld|st)\.volatile[\w.]*|bar(?:rier)?\.(?:cta\.)?sync\w*|fence[\w.]*"
        gcn = r"(?:global|buffer)_(?:load|store|atomic)_\w+|buffer_wbl2|buffer_inv|s_waitcnt vmcnt\(0\)|s_barrier"
        return re.findall(rf"^\s*(?:@!?%\w+ )?({ptx if self.is_ptx else gcn})", self.text, flags=re.M)


def compile_for(target, kernel, *args, **options):
    """Compile ``kernel`` for ``target`` (a name in `TARGETS`) as a launch with these arguments would.

    Fails where the memory of an mbarrier is used for anything else, where the assembler is known to get a use of fp8
    wrong (`codegen.converted_pairs`), and in `make test-all` where the vendor's assembler does not take the code. In
    `make test` that, most of the time for NVIDIA, runs for `Compiled.instructions` alone.
    """
    if EVERYTHING:
        return Compiled(_compiled(target, kernel, args, options))
    return Compiled(_not_assembled(target, kernel, args, options))


def assembly_for(target, kernel, *args, **options):
    """The text of `compile_for` alone; the vendor's assembler does not run."""
    return Compiled(_not_assembled(target, kernel, args, options)).text


def _compiled(target, kernel, args, options):
    triton.runtime.driver.set_active(OfflineDriver(TARGETS[target]))
    kernel.device_caches.clear()
    compiled = kernel.warmup(*args, grid=(1,), **options)
    ptx = compiled.asm.get("ptx", "")
    if "mbarrier.init" in ptx:
        assert not (wrong := used_otherwise(ptx)), f"a barrier's memory is used otherwise: {wrong}"
    assert not (wrong := widened_and_used(ptx)), f"pairs of fp8 that ptxas 12.8 stores too early: {wrong}"
    return compiled


# Of compilations that end before the assembler. In Triton's own cache they would be taken for whole ones.
CACHE = tempfile.TemporaryDirectory()
# What would have assembled them, by their hashes.
_assemblers = {}


def _not_assembled(target, kernel, args, options):
    # Triton's own scope: in 3.6, to delete a knob's value, as mock.patch does at its end, leaves it set.
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope(), triton.knobs.runtime.scope():
        triton.knobs.cache.dir = CACHE.name
        triton.knobs.compilation.disable_line_info = True  # a tenth of the time, and no check looks at lines
        triton.knobs.runtime.add_stages_inspection_hook = _put_off_assembler
        return _compiled(target, kernel, args, options)


def _put_off_assembler(backend=None, stages=None, *_):
    if backend is None:  # newer versions of Triton ask for a part of the cache's key
        return "", ""
    assemble = stages[backend.binary_ext]

    def put_off(text, metadata):
        _assemblers[metadata["hash"]] = functools.partial(assemble, text, dict(metadata))
        return b""

    stages[backend.binary_ext] = put_off


@functools.cache
def _disassembled(compiled_hash):
    return get_sass(_assemblers[compiled_hash]())
