"""Dotted paths of modules, such as `model.layers.0.mlp`, and the numbers of several layers as one text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def is_inside(path: str, module: str) -> bool:
    """Return whether a path is that of a module or below it."""
    return path == module or path.startswith(f"{module}.")


def from_inside(path: str) -> Iterator[str]:
    """Yield a path, then the paths of the modules around it, the nearest first, and "" for the whole model."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def ranges(numbers: Iterable[int], separator: str = ", ") -> str:
    """Return `0, 2..5` for 0, 2, 3, 4 and 5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return separator.join(str(first) if first == last else f"{first}..{last}" for first, last in runs)
