"""Stands for kt-kernel's Python in tests of `ktc bench moe`: speaks `kt_worker.py`'s protocol, rightly or wrongly."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

Bench = Callable[..., tuple[int, str, str]]
KtPython = Callable[[str], str]
TINY = (
    "--shape", "custom", "--hidden", "64", "--intermediate", "32", "--experts", "8", "--top-k", "2", "--rounds", "1",
)  # fmt: skip
WORKS = {
    "open": {"version": "0"},
    "take": {},
    "run": {"cpu": 2e-3, "wall": 3e-3},
    "limits": {"flops": 1e12, "bytes": 1e9},
}


def answer(words: str, asked: str) -> str:
    """One line for one request."""
    if words == "is absent" and asked == "open":
        return json.dumps({"error": "ModuleNotFoundError: No module named 'kt_kernel'"})
    if asked == "run" and words == "dies":
        sys.exit("no kernels for this processor")
    if asked == "run" and words == "chatters":
        return "hello"
    if asked == "run" and words == "fails":
        return json.dumps({"error": "RuntimeError: no such class"})
    if asked == "run" and words == "lies":
        return json.dumps({"cpu": -1, "wall": 1})
    return json.dumps(WORKS[asked])


if __name__ == "__main__":
    for line in sys.stdin:
        print(answer(sys.argv[1], json.loads(line)["do"]), flush=True)
