"""Arguments of other types than those that an operation takes."""

import triton
import triton.language as tl

import iris
from iris import DeviceContext


@triton.jit
def store(context_tensor, heap_bases, target, WHAT: tl.constexpr):
    if WHAT == "rank's address":
        iris.store(target, 1.0, 0, target, heap_bases)
    elif WHAT == "caller's address":
        iris.store(target, 1.0, target, 0, heap_bases)
    elif WHAT == "source's address":
        iris.copy(target, target, target, 0, 0, heap_bases)
    elif WHAT == "context":
        DeviceContext.initialize(target)
    elif WHAT == "heap bases":
        iris.store(target, 1.0, 0, 0, target)
    elif WHAT == "order":
        iris.store(target, 1.0, heap_bases, 0, 0)
    else:
        ctx = DeviceContext.initialize(context_tensor)
        if WHAT == "swapped":
            ctx.store(1.0, target, 0)
        elif WHAT == "value":
            ctx.store(tl.load(target), 1.0, 0)
        elif WHAT == "flag":
            ctx.signal(tl.load(target), 1, 0)
        elif WHAT == "large signal":
            ctx.signal(tl.cast(target, tl.pointer_type(tl.int32), bitcast=True), (1 << 40) + 5, 0)
        elif WHAT == "large wait":
            ctx.wait(tl.cast(target, tl.pointer_type(tl.uint32), bitcast=True), -1)
        elif WHAT == "half":
            ctx.wait(tl.cast(target, tl.pointer_type(tl.int64), bitcast=True), 0.5)
        elif WHAT == "large cmp":
            ctx.atomic_cas(tl.cast(target, tl.pointer_type(tl.int32), bitcast=True), 1 << 40, 1, 0)
        elif WHAT == "half val":
            ctx.atomic_cas(tl.cast(target, tl.pointer_type(tl.int64), bitcast=True), 0, 0.5, 0)
        elif WHAT == "address":
            ctx.store(target, 1.0, target)
        elif WHAT == "address to translate":
            ctx.translate(target, target)
        elif WHAT == "destination's address":
            ctx.copy(target, target, 0, target)
        else:
            ctx.store(target, 1.0, (ctx.cur_rank + 1) / 2)


# What is said of each.
MISTAKES = {
    "context": r".* context tensor of the type pointer<fp32>: .* ctx\.get_device_context\(\)",
    "heap bases": r".* heap_bases of the type pointer<fp32>: .* ctx\.get_heap_bases\(\)",
    "order": r".* heap_bases of the type .*: .* ctx\.get_heap_bases\(\)",
    "swapped": r".* takes a pointer into the heap .* and got 1\.0",
    "value": ".* takes a pointer into the heap .* and got numbers of fp32",
    "flag": ".* takes a pointer into the heap .* and got numbers of fp32",
    "large signal": r"signal\(\) got value=1099511627781, .* flag of int32: that takes -2147483648 to 2147483647",
    "large wait": r"wait\(\) got value=-1, .* flag of uint32: that takes 0 to 4294967295",
    "half": r"wait\(\) got value=0\.5, and a flag of int64 takes a whole number",
    "large cmp": r"atomic_cas\(\) got cmp=1099511627776, .* element of int32: that takes -2147483648 to 4294967295",
    "half val": r"atomic_cas\(\) got val=0\.5, and an element of int64 takes a whole number",
    "divided": "A rank is a whole number.* and got fp32",
    "address": "A rank is a whole number.* and got pointer<fp32>",
    "address to translate": "A rank is a whole number.* and got pointer<fp32>",
    "destination's address": "A rank is a whole number.* and got pointer<fp32>",
    "rank's address": "A rank is a whole number.* and got pointer<fp32>",
    "caller's address": "A rank is a whole number.* and got pointer<fp32>",
    "source's address": "A rank is a whole number.* and got pointer<fp32>",
}
