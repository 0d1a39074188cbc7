"""Write a set of module paths as few globs that match no other path of the model.

Paths that differ in their layer alone become a range (`[3..60]`, or `*` for all layers that have the path),
siblings become a choice (`{q_proj,o_proj}`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

_LAYER = "#"  # stands for the layer in a template; no module is called that
_MAX_CHOICES = 8  # siblings in one glob: longer lists are not readable


def globs_of(paths: Collection[str], universe: Iterable[str]) -> tuple[str, ...]:
    """Return globs that match the paths and no other path of the universe, which contains them all."""
    everywhere = _by_template(universe)
    siblings: dict[tuple[str, str], list[str]] = defaultdict(list)
    for template, layers in _by_template(paths).items():
        parent, _, name = template.rpartition(".")
        for span in _spans(layers, everywhere[template]):
            siblings[parent, span].append(name)
    return tuple(glob for (parent, span), names in siblings.items() for glob in _globs(parent, span, names))


def _by_template(paths: Iterable[str]) -> dict[str, set[int]]:
    """Group the layers by template. A path without a layer is its own template, without layers."""
    layers: dict[str, set[int]] = defaultdict(set)
    for path in paths:
        parts = path.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is None:
            layers[path].update()
        else:
            layers[".".join([*parts[:at], _LAYER, *parts[at + 1 :]])].add(int(parts[at]))
    return layers


def _spans(layers: set[int], everywhere: set[int]) -> list[str]:
    if not layers:
        return [""]
    if layers == everywhere and len(layers) > 1:
        return ["*"]
    starts = [layer for layer in sorted(layers) if layer - 1 not in layers]
    ends = [layer for layer in sorted(layers) if layer + 1 not in layers]
    return [str(first) if first == last else f"[{first}..{last}]" for first, last in zip(starts, ends, strict=True)]


def _globs(parent: str, span: str, names: list[str]) -> Iterable[str]:
    size = _MAX_CHOICES if parent else 1
    for start in range(0, len(names), size):
        choice = names[start : start + size]
        name = choice[0] if len(choice) == 1 else f"{{{','.join(choice)}}}"
        glob = f"{parent}.{name}" if parent else name
        yield ".".join(span if part == _LAYER else part for part in glob.split("."))
