"""Arguments of collectives' kernels in NamedTuples: what the JIT makes a kernel of its own for, and what not."""

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature

from iris.ccl.exchange import exchange
from iris.ccl.kernel_arguments import ExchangeForm, PieceLayout, PieceTiling, QueueMemory

X = torch.zeros(64, dtype=torch.int64)
TILING = PieceTiling(BLOCK_M=1, BLOCK_N=64, SLOT=64, ROWS="one")
FORM = ExchangeForm(SAME=True, PARTITIONED=False, DIRECT=True, PROGRAMS=2, QUEUES=2)


def specialised(to, sources, row=4096):
    bind = create_function_from_signature(exchange.signature, exchange.params, CUDABackend(GPUTarget("cuda", 90, 32)))
    given = {
        "queues": QueueMemory(X, X, X, X, X),
        **{"input": X, "output": X, "rows": 1, "layout": PieceLayout(row, row, row, 0, 0), "length": 8 * row},
        **{"to_first": to.start, "to_last": to.stop, "from_first": sources.start, "from_last": sources.stop},
        **{"W": 2, "TILING": TILING, "FORM": FORM},
    }
    _, kinds, _ = bind(*(given[name] for name in exchange.arg_names))
    return dict(zip(exchange.arg_names, kinds, strict=True))


@pytest.mark.parametrize("receiver", [0, 1, 16])
def test_both_ends_of_a_message_are_the_same_kernel(receiver):
    """Whoever sends or receives: 0, 1 and multiples of 16 would make other kernels."""
    sends = specialised(to=range(receiver, receiver + 1), sources=range(0))
    assert sends == specialised(to=range(0), sources=range(3, 4))


def test_lengths_of_rows_and_tensors_are_specialised():
    nobody = range(0)
    assert specialised(nobody, nobody, 4096)["layout"] == (("i32",) * 5, ("D",) * 5)
    assert specialised(nobody, nobody, 5)["layout"] == (("i32",) * 5, ("", "", "", "D", "D"))
    assert specialised(nobody, nobody, 1)["layout"][0] == ("constexpr",) * 3 + ("i32",) * 2
    kinds, notes = specialised(nobody, nobody)["queues"]
    assert (kinds, notes[:5]) == (("*i64",) * 5 + ("constexpr",), ("D",) * 5)
