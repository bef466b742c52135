"""Python's parser for one thread at a time.

CPython counts how deep it is in a tree in memory of the interpreter, which its threads share (Python/Python-ast.c,
``PyAST_mod2obj``). Where threads took turns there it raised SystemError, "AST constructor recursion depth mismatch".
Programs launch kernels in several threads, and each is parsed.
"""

import ast
import threading

# One thread may come back, where what it allocates has Python collect garbage.
_lock = threading.RLock()


def parse(source: str) -> ast.Module:
    """As `ast.parse`."""
    with _lock:
        return ast.parse(source)
