"""The shards of a checkpoint that are absent, by the numbers in their names: `model-00002-of-00003.safetensors`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_SHARD: Final = re.compile(r"(?P<stem>.*?)-(?P<number>\d+)-of-(?P<total>\d+)(?P<ending>\.\w+)")
_MOST: Final = 10_000  # a larger total does not count shards


def absent_shards(files: Iterable[str]) -> tuple[str, ...]:
    """Return the names that the numbering of `files` demands and that are not among them, in order."""
    present = set(files)
    absent = set[str]()
    for name in filter(None, map(_SHARD.fullmatch, present)):
        digits, total = len(name["number"]), int(name["total"])
        if total <= _MOST:
            absent |= {
                f"{name['stem']}-{number:0{digits}d}-of-{name['total']}{name['ending']}"
                for number in range(1, total + 1)
            } - present
    return tuple(sorted(absent))
