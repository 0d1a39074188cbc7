"""Mutations that know the structure of their input: JSON values, binary headers, tokens of a text.

In: the bytes of a whole input, a source of randomness, and others of its kind to take pieces from. Out: the bytes of a
broken one.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import re
import struct
import zipfile
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Mutate = Callable[[bytes, Random, Sequence[bytes]], bytes]

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 255, 2**31, 2**32, 2**53, 2**63, -(2**63), 10**30, -(10**30), 10**400, 1e308,
    -1e308, 1e-320, 0.5, float("nan"), float("inf"), -float("inf"), "", " ", "x", "x" * 5000, "../../etc/passwd",
    "/etc/passwd", ".", "..", "a/b", "a\\b", "\x00", "a\x00b", "\ud800", "\x1b[31m", "é", "()", "(a+)+$", "re:(a|a)*$",
    "re:(", "bf16", "F32", "I64", "cuda:0", "cpu", "1", "-1", "nan", "null", "__class__", "{{ 7 * 7 }}", "%s%n", [], {},
    [[]], [None], [0], [-1], [1, 1], ["x"], {"": None}, {"x": {}}, {"x": [1]}, [1.5], [True], [2**62, 2**62], [0] * 100,
)  # fmt: skip
_REPEATED = 10_000  # characters of a list that is repeated many times: mutants of mutants would grow without end
INTEGERS = (0, 1, 2, 7, 8, 31, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1,
            2**63, 2**64 - 1)  # fmt: skip


# JSON ----------------------------------------------------------------------------------------------------------------
def json_text(content: bytes, chance: Random, others: Sequence[bytes]) -> bytes:
    """Mutate the values of a JSON text, and one time in eight its bytes."""
    if chance.randrange(8) == 0:
        return binary(content, chance, others)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return binary(content, chance, others)
    try:
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            value = _changed(value, chance)
        return _dumped(value, chance)
    except RecursionError:  # a copy of something nested in itself
        return b"[" * 2000 + b"]" * 2000


def _dumped(value: Any, chance: Random) -> bytes:
    text = json.dumps(value, ensure_ascii=chance.randrange(4) > 0, indent=chance.choice((None, 1)))
    return text.encode(errors="surrogatepass")


def _changed(value: Any, chance: Random) -> Any:
    """Change one place of a JSON value; deeper places are as likely as shallow ones."""
    path = _random_path(value, chance)
    if not path:
        return _other(value, value, chance)
    parent = value
    for step in path[:-1]:
        parent = parent[step]
    last = path[-1]
    match chance.randrange(10):
        case 0:
            del parent[last]
        case 1 if isinstance(parent, dict):
            parent[_key(value, chance)] = parent.pop(last)
        case 2 if isinstance(parent, dict):
            parent[_key(value, chance)] = _other(value, parent[last], chance)
        case 3 if isinstance(parent, list):
            parent.insert(chance.randrange(len(parent) + 1), copy.deepcopy(chance.choice(parent)))
        case 4 if isinstance(parent, list):
            parent *= chance.choice((0, 2, 50 if len(json.dumps(parent)) < _REPEATED else 2))
        case _:
            parent[last] = _other(value, parent[last], chance)
    return value


def _random_path(value: Any, chance: Random) -> list[Any]:
    path: list[Any] = []
    while isinstance(value, dict | list) and value and (not path or chance.randrange(4)):
        path.append(chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value)))
        value = value[path[-1]]
    return path


def _other(whole: Any, old: Any, chance: Random) -> Any:
    match chance.randrange(9):
        case 0 if type(old) is int:
            return old + chance.choice((-1, 1, 2, -old, -2 * old, old, 2**32))
        case 1 if type(old) is float:
            return -old
        case 2 if isinstance(old, str) and old:
            place = chance.randrange(len(old))
            return old[:place] + chance.choice(("", "x", "\x00", "/", "..", ".", "é", "9")) + old[place + 1 :]
        case 3:
            return [old]
        case 4:
            return {"x": old}
        case 5:
            return copy.deepcopy(_at(whole, _random_path(whole, chance)))
        case 6 if chance.randrange(20) == 0:
            return _nested(chance.choice((40, 900)))
        case _:
            return copy.deepcopy(chance.choice(VALUES))


def _key(whole: Any, chance: Random) -> str:
    if chance.randrange(2):
        path = [step for step in _random_path(whole, chance) if isinstance(step, str)]
        if path:
            return chance.choice(path)
    return chance.choice(("", "x", "\x00", "__metadata__", "../x", "x" * 300, "__class__", "a.b", "0", "\ud800"))


def _at(value: Any, path: Sequence[Any]) -> Any:
    for step in path:
        value = value[step]
    return value


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


# Bytes ---------------------------------------------------------------------------------------------------------------
def binary(content: bytes, chance: Random, others: Sequence[bytes]) -> bytes:
    """Mutate bytes: single ones, little-endian integers, and pieces that are cut, repeated or taken from another."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 4))):
        place = chance.randrange(len(data) + 1)
        match chance.randrange(8):
            case 0 if place < len(data):
                data[place] ^= 1 << chance.randrange(8)
            case 1 if place < len(data):
                data[place] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, 0x0A, 0x22))
            case 2:
                code = chance.choice("BHIQ")
                value = chance.choice(INTEGERS) & (256 ** struct.calcsize(f"<{code}") - 1)
                data[place : place + struct.calcsize(f"<{code}")] = struct.pack(f"<{code}", value)
            case 3:
                del data[place : place + chance.choice((1, 4, 8, 64, 1000))]
            case 4:
                data[place:place] = data[place : place + chance.choice((1, 8, 64))]
            case 5 if others:
                other = chance.choice(others)
                start = chance.randrange(len(other) + 1)
                data[place : place + 16] = other[start : start + chance.choice((4, 16, 64))]
            case 6:
                del data[place:]
            case _:
                data[place:place] = chance.randbytes(chance.choice((1, 4, 8)))
    return bytes(data)


def safetensors(content: bytes, chance: Random, others: Sequence[bytes]) -> bytes:
    """Mutate the JSON header of a safetensors file under a correct length, or the bytes of the file."""
    length = int.from_bytes(content[:8], "little")
    if chance.randrange(4) == 0 or not 0 < length <= len(content) - 8:
        return binary(content, chance, others)
    header = json_text(content[8 : 8 + length], chance, ())
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def packed_file(content: bytes, chance: Random, others: Sequence[bytes]) -> bytes:
    """Mutate the header of a packed layer under a correct length and digest, or its bytes. The data is left out."""
    length = int.from_bytes(content[8:12], "little")
    if chance.randrange(4) == 0 or not 0 < length <= len(content) - 12:
        return binary(content, chance, others)
    header = json_text(content[12 : 12 + length], chance, ())
    return content[:8] + struct.pack("<I", len(header) & 0xFFFFFFFF) + header + hashlib.sha256(header).digest()


def torch_file(content: bytes, chance: Random, others: Sequence[bytes]) -> bytes:
    """Mutate the pickle in a file of `torch.save` under correct sums, or the bytes of the file."""
    if chance.randrange(4) == 0:
        return binary(content, chance, others)
    out = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(out, "w") as made:
            for entry in archive.infolist():
                held = archive.read(entry)
                is_pickle = entry.filename.endswith("data.pkl")
                if is_pickle or chance.randrange(40) == 0:
                    held = binary(held, chance, ())
                made.writestr(entry.filename, held)
    except Exception:  # noqa: BLE001  # the archive is a mutant itself: zipfile and zlib raise errors of many classes
        return binary(content, chance, others)
    return out.getvalue()


# Text ----------------------------------------------------------------------------------------------------------------
_TOKEN = re.compile(r'\s+|\w+|"[^"\n]*"|[^\w\s]')
_PIECES = (
    *("{", "}", "(", ")", "[", "]", ":", ",", "=", "-", "- ", "\n", "\n\n", "\t", "  ", "#", "'", '"', "\\", "\\u0000"),
    *("9" * 30, "-1", "0", "1e999", "nan", "true", "null", "~", "!!python/object:os.system", "&a", "*a", "<<: *a", "|"),
    *("\x00", "\ud83d", "é", "\u2028", "\r", "\x0b", "[[gpu]]", "GiB", "x" * 2000, "2026-13-01", "[" * 100, "{" * 100),
)


def text(content: bytes, chance: Random, others: Sequence[bytes]) -> bytes:
    """Mutate the tokens of a text, and one time in eight its bytes."""
    return tokens(content, chance, others, _PIECES)


def tokens(content: bytes, chance: Random, others: Sequence[bytes], pieces: Sequence[str]) -> bytes:
    """Mutate the tokens of a text with `pieces` of its language, and one time in eight its bytes."""
    if chance.randrange(8) == 0:
        return binary(content, chance, others)
    found = _TOKEN.findall(content.decode(errors="surrogateescape")) or [" "]
    for _ in range(chance.choice((1, 1, 2, 5))):
        place = chance.randrange(len(found))
        match chance.randrange(6):
            case 0:
                del found[place : place + chance.choice((1, 1, 3, 20))]
            case 1:
                found.insert(place, chance.choice(pieces))
            case 2:
                found[place] = chance.choice(found)
            case 3:
                found[place] = chance.choice(pieces)
            case 4:
                found[place:place] = found[place : place + 30]
            case _:
                found += _TOKEN.findall(chance.choice(others or (content,)).decode(errors="surrogateescape"))[:200]
        found = found or [" "]
    return "".join(found).encode(errors="surrogatepass")


def rows(content: bytes, chance: Random, others: Sequence[bytes]) -> bytes:
    """Mutate one line of JSON lines, or the text as a whole."""
    lines = content.split(b"\n")
    if chance.randrange(3) == 0:
        return text(content, chance, others)
    place = chance.randrange(len(lines))
    lines[place] = json_text(lines[place], chance, ()).replace(b"\n", b" ") if lines[place] else b"{}"
    return b"\n".join(lines)
