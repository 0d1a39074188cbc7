"""Paths of modules, written as one: layers as ranges."""

from __future__ import annotations

from collections.abc import Sequence

from ktc.foundation.module_paths import ranges


def collapse(paths: Sequence[str]) -> str:
    """`model.layers.[1..26].mlp` for paths that differ only in their first number."""
    numbers = [number for _, number in map(split_at_number, paths) if number is not None]
    if len(paths) == 1 or not numbers:
        return paths[0]
    return split_at_number(paths[0])[0].replace("*", f"[{ranges(numbers, ',')}]")


def split_at_number(path: str) -> tuple[str, int | None]:
    """Return a path with its first number as `*`, and that number."""
    parts = path.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return (path, None) if at is None else (".".join([*parts[:at], "*", *parts[at + 1 :]]), int(parts[at]))
