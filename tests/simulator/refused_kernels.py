"""Kernels that do, if they are ``WRONG``, what Triton compiles for no GPU. Else they write five ones."""

import triton
import triton.language as tl

PLAIN, CONSTANT = 3, tl.constexpr(3)


def doubled(x):
    return 2 * x


@triton.jit
def breaks(out, n, WRONG: tl.constexpr):
    for i in range(n):
        if WRONG:
            if i == 2:
                break
        tl.store(out + i, 1)


@triton.jit
def goes_on(out, n, WRONG: tl.constexpr):
    i = 0
    while i < n:
        tl.store(out + i, 1)
        i += 1
        if WRONG:
            continue


@triton.jit
def returns(out, n, WRONG: tl.constexpr):
    for i in range(n):
        tl.store(out + i, 1)
        if WRONG:
            if i == 2:
                return
    return


@triton.jit
def tries(out, n, WRONG: tl.constexpr):
    for i in tl.static_range(5):
        if WRONG:
            try:
                tl.store(out + i, 1)
            finally:
                pass
        else:
            tl.store(out + i, 1)


@triton.jit
def looks_up(out, n, WRONG: tl.constexpr):
    value = {"one": 1}["one"] if WRONG else 1
    for i in range(n):
        tl.store(out + i, value)


@triton.jit
def has_a_global(out, n, WRONG: tl.constexpr):
    value = PLAIN if WRONG else CONSTANT
    for i in range(n):
        tl.store(out + i, value - 2)


@triton.jit
def calls_python(out, n, WRONG: tl.constexpr):
    for i in range(n):
        tl.store(out + i, doubled(i) if WRONG else 1)


@triton.jit
def asks_a_block(out, n, WRONG: tl.constexpr):
    numbers = tl.arange(0, 8)
    if (numbers < n) if WRONG else n > 0:
        tl.store(out + numbers, 1, mask=numbers < n)


@triton.jit
def changes_a_dtype(out, n, WRONG: tl.constexpr):
    one = 1
    for i in range(n):
        tl.store(out + i, one)
        if WRONG:
            one = one * 1.0


@triton.jit
def changes_a_shape(out, n, WRONG: tl.constexpr):
    for i in range(n):
        numbers = i + tl.arange(0, 1)
        tl.store(out + numbers, 1)
    i, last = 0, 0
    while i < n:
        numbers = tl.arange(0, 8)[None, :]  # another than that of the other loop
        last = tl.max(numbers, axis=1) if WRONG else i
        i += 1
    tl.store(out + last, 1)


# What is said of each.
REFUSED = [
    (breaks, "Triton compiles no such statement or expression: break"),
    (goes_on, "Triton compiles no such statement or expression: continue"),
    (returns, "a return within a loop"),
    (tries, "Triton compiles no such statement or expression: try:"),
    (looks_up, "Triton compiles no such statement or expression: {'one': 1}"),
    (has_a_global, r"the global PLAIN, .* PLAIN = tl.constexpr\(...\), or pass it as an argument"),
    (calls_python, r"doubled\(\), which does not compile: decorate it with triton.jit"),
    (changes_a_dtype, "one is int32 before a loop and fp32 after a round of it"),
    (changes_a_shape, "last is int32 before a loop and .* after a round of it"),
    (asks_a_block, "A condition on a block of 8 elements does not compile: use masks"),
]
