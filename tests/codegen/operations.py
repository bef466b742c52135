"""What the operations in a kernel's generated code are, PTX and AMD GCN alike."""


def is_barrier(op):
    return op.startswith(("bar.", "barrier.", "s_barrier"))


def is_acquire(op):
    return "acquire" in op or "acq_rel" in op or op == "buffer_inv"


def is_data(op):
    """A 16-byte access of the kernel's data."""
    return op.endswith(("v4.b32", "v4.f32", "v2.b64", "dwordx4"))


def releases(operations):
    """The positions of the atomics that release. On AMD that is the first one after a write-back of the L2."""
    positions = [
        i for i, op in enumerate(operations) if op.startswith(("atom", "red")) and ("release" in op or "acq_rel" in op)
    ]
    written_back = False
    for i, op in enumerate(operations):
        written_back |= op == "buffer_wbl2"
        if written_back and op.startswith("global_atomic"):
            positions.append(i)
            written_back = False
    return positions
