"""The module tree as a summary: equal layers become one line, parameters and bytes are summed upwards.

Input: the modules of a `ModelDump`, in any order. Output: `TreeLine`s in tree order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ktc.foundation.module_paths import ranges
from ktc.stages.pictures.dump import ModuleDump
from ktc.stages.pictures.labels import printable


@dataclass(frozen=True, slots=True)
class TreeLine:
    """One line. `name` is the last part of the FQN, or `[1..26]` for `copies` equal layers; counts are for one copy.

    `fqn` is the FQN with that range in it, `first` the FQN of the first copy.
    """

    depth: int
    name: str
    fqn: str
    first: str
    class_name: str
    copies: int
    parameters: int
    bytes: int
    device: str
    rule: str


@dataclass(slots=True)
class _Branch:
    fqn: str
    name: str
    module: ModuleDump | None = None
    children: dict[str, _Branch] = field(default_factory=dict[str, "_Branch"])

    def total(self) -> tuple[int, int]:
        below = [child.total() for child in self.children.values()]
        counts = (self.module.parameters, self.module.bytes) if self.module else (0, 0)
        return counts[0] + sum(p for p, _ in below), counts[1] + sum(b for _, b in below)

    def likeness(self) -> tuple[object, ...]:
        """Return a key that is equal for branches that may share a line: classes, sizes, devices and rules at all
        levels.
        """
        m = self.module
        facts = (m.class_name, m.parameters, m.bytes, m.device, m.rule) if m else ()
        return facts, tuple((child.name, child.likeness()) for child in self.children.values())


def module_tree(modules: tuple[ModuleDump, ...]) -> tuple[TreeLine, ...]:
    """Return the lines of the tree; runs of equal numbered children are collapsed, others with their counts."""
    root = _Branch("", "")
    for module in modules:
        branch = root
        for part in module.fqn.split(".") if module.fqn else ():
            branch = branch.children.setdefault(part, _Branch(f"{branch.fqn}.{part}".lstrip("."), part))
        branch.module = module
    lines: list[TreeLine] = []
    if root.module is not None:
        _append(root, [root], 0, lines)
    else:
        _append_children(root, 0, lines)
    return tuple(lines)


def _append(branch: _Branch, alike: list[_Branch], depth: int, lines: list[TreeLine]) -> None:
    parameters, size = branch.total()
    name = branch.name if len(alike) == 1 else f"[{ranges(int(b.name) for b in alike)}]"
    module = branch.module or ModuleDump(branch.fqn, "", 0, 0)
    parent = branch.fqn[: len(branch.fqn) - len(branch.name)]
    lines.append(
        TreeLine(
            depth=depth,
            name=printable(name or "model", 80),
            fqn=printable(parent + name),
            first=branch.fqn,
            class_name=printable(module.class_name, 80),
            copies=len(alike),
            parameters=parameters,
            bytes=size,
            device=printable(module.device, 40),
            rule=printable(module.rule, 60),
        )
    )
    _append_children(branch, depth + 1, lines)


def _append_children(branch: _Branch, depth: int, lines: list[TreeLine]) -> None:
    groups: dict[object, list[_Branch]] = {}
    for child in branch.children.values():
        numbered = child.name.isdecimal() and child.name.isascii()
        groups.setdefault(child.likeness() if numbered else child.fqn, []).append(child)
    for alike in groups.values():
        _append(alike[0], alike, depth, lines)
