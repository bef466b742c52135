"""A digest of a kernel's instructions, in which no name counts: what is renamed, moved or commented stays equal."""

import hashlib
import re

# What says where code comes from, for whom it is, and where it begins and ends.
_DIRECTIVES = r"\.(?:file|loc|cfi_\w+|size|ident|version|target|address_size|amdgcn_target)\b.*"
_MARKS = r"(?:\$L__|\.L)(?:tmp|func_begin|func_end|sec_end)\d+:"
_UNSEEN = re.compile(f"{_DIRECTIVES}|{_MARKS}")
_SECTION = re.compile(r"\.(?:section|text|amdgpu_metadata)\b")
# Debug information, and the types and names of arguments.
_SKIPPED = re.compile(r"\.section \.debug|\.amdgpu_metadata")
# Of functions, memory and labels, and of registers in inline assembly; the compiler's own labels are numbers.
_DECLARATIONS = {
    "ptx": re.compile(
        r"\.(?:entry|func) (?:\([^)]*\) ?)?([\w$]+)"
        r"|\.(?:shared|global|const|local) (?:[^;\[=(\n]* )?([\w$]+) ?[\[=;]"
        r"|^(?!\$L__)([\w$]+):"
        r"|\.reg \.\w+ ([A-Za-z_$][^;%<]*);",
        re.MULTILINE,
    ),
    "gcn": re.compile(r"\.amdhsa_kernel ([\w$.]+)|\.type ([\w$.]+), ?@"),
}
_COMMENTS = {"ptx": re.compile(r"//.*"), "gcn": re.compile(r";.*|//.*")}
# After a name; in PTX no point is, as "add" in "add.s32" is none.
_END = {"ptx": r"(?=_param_\d|[^\w$.]|$)", "gcn": r"(?![\w$])"}


def instructions(text: str) -> list[str]:
    """The lines of PTX or AMD's assembly that a GPU sees anything of, with numbers for names."""
    kind = "ptx" if ".address_size" in text else "gcn"
    lines, skipping = [], False
    for line in text.splitlines():
        line = " ".join(_COMMENTS[kind].sub("", line).split())
        if _SECTION.match(line):
            skipping = bool(_SKIPPED.match(line))
        if line and not skipping and not _UNSEEN.match(line):
            lines.append(line)
    return _without_names("\n".join(lines), kind).split("\n")


def _without_names(text: str, kind: str) -> str:
    """Each name that the text declares becomes the number of its first appearance."""
    declared = {name for found in _DECLARATIONS[kind].finditer(text) for name in found.groups() if name}
    names = {name.strip() for several in declared for name in several.split(",")}
    if not names:
        return text
    numbers: dict[str, str] = {}
    longest_first = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.sub(
        # AMD's compiler has what it counts of a kernel in symbols of its own: .Lkernel.num_vgpr.
        rf"(?<![\w$.%])((?:\.L)?)({longest_first}){_END[kind]}",
        lambda found: found[1] + numbers.setdefault(found[2], f"name{len(numbers)}"),
        text,
    )


def digest(text: str) -> str:
    return hashlib.sha256("\n".join(instructions(text)).encode()).hexdigest()[:16]
