"""Python's parser for one thread at a time.

CPython counts how deep it is in a tree for all threads together when it makes the tree's nodes, and raises SystemError
where threads take turns there (CPython issue 106905). Programs launch kernels in several threads, and each is parsed.
"""

import ast
import threading

# One thread may come back, where what it allocates has Python collect garbage.
_lock = threading.RLock()


def parse(source: str) -> ast.Module:
    """As `ast.parse`."""
    with _lock:
        return ast.parse(source)
