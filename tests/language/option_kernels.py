"""The context's moves and an atomic with all that may be said of how they access memory, in both languages.

``begin``, an element at which all begins, is nothing that the compiler knows the alignment of.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris.gluon as iris_gl
from iris import DeviceContext
from iris.gluon import IrisDeviceCtx


@triton.jit(do_not_specialize=["begin"])
def triton_moves(
    context_tensor, source, target, begin, peer, OP: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr,
    HINT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    ctx = DeviceContext.initialize(context_tensor)
    x, y = source + begin + tl.arange(0, BLOCK), target + begin + tl.arange(0, BLOCK)
    if OP == "load":
        tl.store(target + tl.arange(0, BLOCK), ctx.load(x, peer, cache_modifier=LOAD, hint=HINT))
    elif OP == "store":
        ctx.store(y, tl.load(source + tl.arange(0, BLOCK)), peer, cache_modifier=STORE, hint=HINT)
    elif OP == "get":
        ctx.get(x, y, peer, load_cache_modifier=LOAD, store_cache_modifier=STORE, hint=HINT)
    elif OP == "put":
        ctx.put(x, y, peer, load_cache_modifier=LOAD, store_cache_modifier=STORE, hint=HINT)
    elif OP == "copy":
        ctx.copy(x, y, peer, ctx.cur_rank, load_cache_modifier=LOAD, store_cache_modifier=STORE, hint=HINT)
    elif OP == "cas":
        ctx.atomic_cas(target + begin, 0, tl.load(source + begin), peer, hint=HINT)
    else:
        ctx.atomic_add(y, tl.load(source + tl.arange(0, BLOCK)), peer, sem="relaxed", hint=HINT)


@gluon.jit(do_not_specialize=["begin"])
def gluon_moves(
    context_tensor, source, target, begin, peer, OP: gl.constexpr, LOAD: gl.constexpr, STORE: gl.constexpr,
    HINT: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    ctx = IrisDeviceCtx.initialize(context_tensor)
    o = gl.arange(0, BLOCK, layout=gl.BlockedLayout([8], [iris_gl.threads_per_warp()], [gl.num_warps()], [0]))
    x, y = source + begin + o, target + begin + o
    if OP == "load":
        gl.store(target + o, ctx.load(x, peer, cache_modifier=LOAD, hint=HINT))
    elif OP == "store":
        ctx.store(y, gl.load(source + o), peer, cache_modifier=STORE, hint=HINT)
    elif OP == "get":
        ctx.get(x, y, peer, load_cache_modifier=LOAD, store_cache_modifier=STORE, hint=HINT)
    elif OP == "put":
        ctx.put(x, y, peer, load_cache_modifier=LOAD, store_cache_modifier=STORE, hint=HINT)
    elif OP == "copy":
        ctx.copy(x, y, peer, ctx.cur_rank, load_cache_modifier=LOAD, store_cache_modifier=STORE, hint=HINT)
    elif OP == "cas":
        ctx.atomic_cas(target + begin, 0, gl.load(source + begin), peer, hint=HINT)
    else:
        ctx.atomic_add(y, gl.load(source + o), peer, sem="relaxed", hint=HINT)
