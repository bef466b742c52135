"""Names are the field's words: those of NCCL, NVSHMEM, CUDA, Triton and torch."""

import io
import re
import tokenize

from test_rules import SOURCES, name

# Private words for ideas that have a name in the field, by the folder where that name must stand instead. Those of ""
# are in no folder. Others are plain words elsewhere, as `taken` of a lock; `find`, `keep`, `place` and `push` are so
# everywhere. They are regular expressions, of names without leading underscores.
PRIVATE_WORDS = {
    "": """
        send_stamped receive_stamped stamped send_marked receive_marked clear_marked marked absent unmark
        follow_predecessor admit_successor gather_block reread SENT GOT await_room conclude
        (tell|told|hears?|heard)(_.*)? tells Told Heard Came Met Wrong HostTold HostHeard deaf
        Seat seat seats take_seat find_seat KEPT untraced untraced_methods note_written
        on_chiplets emptied LINES_A LINES_B BY_COLUMNS_A BY_COLUMNS_B SPREADS
    """,
    "ccl/": "awaited inspect post offer meet pick leave most MET",
    "language/": "awaited inspect post offer meet pick leave",
    "ops/": "loaded freed filled taken",
    "sanitizer/": "came met wrong",
}
PRIVATE_FILES = {"ccl/push.py", "language/stamped.py", "language/marked.py", "untraced.py", "versions.py"}


def private_words(text, words):
    """The names in ``text`` that are one of the words, with or without a leading underscore; and their lines."""
    private = "|".join(words.split())
    if not re.search(rf"\b_*({private})\b", text):
        return []  # tokens take long
    tokens, private = tokenize.generate_tokens(io.StringIO(text).readline), re.compile(private)
    return [f"{each.start[0]}: {each.string}" for each in tokens if private.fullmatch(each.string.lstrip("_"))]


def test_names_are_those_of_the_field():
    """Words of comments, docstrings and messages do not count."""
    lines = ["def _tell_all(x):  # told", "    retell = 'tell'", "    return x.told(tell=retell)"]
    assert private_words("\n".join(lines), "told tell(_.*)?") == ["1: _tell_all", "3: told", "3: tell"]
    assert not PRIVATE_FILES & {name(file) for file in SOURCES}
    for file in SOURCES:
        for folder, words in PRIVATE_WORDS.items():
            assert not name(file).startswith(folder) or not private_words(file.read_text(), words), name(file)
