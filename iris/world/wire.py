"""How values are encoded for meetings: as JSON, so that nothing that is read can run code, as a pickle could.

The store authenticates nobody, so whoever can reach it can write there. Objects of users travel through the process
group instead, as in torch's object collectives (`iris.world.object_broadcast`).
"""

import base64
import json
from typing import Any

from iris.errors import short_repr

_PLAIN = (str, int, float, bool, type(None))


def encode(value: Any) -> bytes:
    """None, bool, int, float, str, bytes, and lists, tuples (named ones become plain) and dicts of these.

    Raises
    ------
    TypeError
        There is something else in it.
    """
    return json.dumps(_tagged(value)).encode()


def decode(text: bytes) -> Any:
    """The value that ``text`` encodes. Raises `ValueError` if `encode` has not made it."""
    try:
        return _untagged(json.loads(text))
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _tagged(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list):
        return [_tagged(each) for each in value]
    # JSON has no tuples, no bytes, and only texts as keys: an object of one entry says which it is.
    if isinstance(value, tuple):
        return {"tuple": [_tagged(each) for each in value]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {"dict": [[_tagged(key), _tagged(each)] for key, each in value.items()]}
    raise TypeError(f"A {type(value).__name__} cannot be sent in a meeting of ranks: {short_repr(value)}.")


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "bytes":
        return base64.b64decode(content, validate=True)
    if tag == "dict":
        return {_untagged(key): _untagged(each) for key, each in content}
    return {"tuple": tuple}[tag](map(_untagged, content))
