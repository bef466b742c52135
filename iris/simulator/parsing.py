"""Python's parser for one thread at a time.

CPython counts its recursion depth, while it makes a syntax tree, in memory that all threads share (Python/Python-ast.c,
``PyAST_mod2obj``). If threads switch meanwhile, it raises SystemError, "AST constructor recursion depth mismatch".
Programs may launch kernels from several threads, and each kernel is parsed at its first launch.
"""

import ast
import threading

# The same thread may come again: memory that it allocates here may start garbage collection, and that a destructor.
_lock = threading.RLock()


def parse(source: str) -> ast.Module:
    """As `ast.parse`."""
    with _lock:
        return ast.parse(source)
