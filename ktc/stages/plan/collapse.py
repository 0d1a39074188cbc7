"""Paths of modules, written as one: layers as ranges."""

from __future__ import annotations

from collections.abc import Sequence


def collapse(paths: Sequence[str]) -> str:
    """`model.layers.[1..26].mlp` for paths that differ only in their first number."""
    numbers = sorted(number for _, number in map(split_at_number, paths) if number is not None)
    if len(paths) == 1 or not numbers:
        return paths[0]
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
    return split_at_number(paths[0])[0].replace("*", f"[{shown}]")


def split_at_number(path: str) -> tuple[str, int | None]:
    """Return a path with its first number as `*`, and that number."""
    parts = path.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return (path, None) if at is None else (".".join([*parts[:at], "*", *parts[at + 1 :]]), int(parts[at]))
