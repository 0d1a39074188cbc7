"""The difference of two dumps: before and after rewriting, or two plans of one model.

Input: two `ModelDump`s. Output: a frozen `ModelDiff` with the blocks, nodes and modules that differ, as JSON or text.
Nodes are paired by name, then by FQN, so that a linear and the module that replaced it are one change.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, cast

from ktc.foundation.module_paths import from_inside
from ktc.stages.pictures.dump import BlockDump, ModelDump, ModuleDump, NodeDump
from ktc.stages.pictures.labels import WEIGHT, call_text, collapse, layers_text, printable, rule_text, type_text

Kind = Literal["added", "removed", "changed"]


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One field of a node or module with its two values as text."""

    field: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class NodeDiff:
    """A node that is new, gone or different. `before` is None for a new one, `after` for one that is gone."""

    kind: Kind
    before: NodeDump | None
    after: NodeDump | None
    changes: tuple[FieldChange, ...]


@dataclass(frozen=True, slots=True)
class BlockDiff:
    """A block that is new, gone or has differing nodes."""

    kind: Kind
    key: str
    class_name: str
    layers: tuple[int, ...]
    nodes: tuple[NodeDiff, ...]
    num_same: int = 0


@dataclass(frozen=True, slots=True)
class ModuleDiff:
    """A module that is new, gone or differs in class, size, device or rule."""

    kind: Kind
    fqn: str
    changes: tuple[FieldChange, ...]


@dataclass(frozen=True, slots=True)
class ModelDiff:
    """Everything that differs, in the order of the graphs. `before` and `after` name the model and its stage."""

    before: str
    after: str
    blocks: tuple[BlockDiff, ...]
    modules: tuple[ModuleDiff, ...]
    num_same_blocks: int = 0
    num_same_modules: int = 0

    def __bool__(self) -> bool:
        return bool(self.blocks or self.modules)

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))

    def text(self) -> str:
        """Return lines with `+`, `-` and `~`, equal changes together. Ends with a newline.

        Unchanged rows are counts (`=`). Rows that differ in their device alone are counts too, and in the modules they
        are folded into the module around them that moved alike. The JSON has all rows that differ.
        """
        lines = [f"{printable(self.before)} -> {printable(self.after)}"]
        for block in self.blocks:
            lines += ["", *_block_lines(block)]
        if self.num_same_blocks:
            lines += ["", f"= {_count(self.num_same_blocks, 'block')} unchanged"]
        if self.modules:
            lines += ["", "modules", *_module_lines(self.modules)]
            lines += [f"  = {_count(self.num_same_modules, 'module')} unchanged"] if self.num_same_modules else []
        return "\n".join(lines if self else [*lines, "no difference"]) + "\n"


def diff(before: ModelDump, after: ModelDump) -> ModelDiff:
    """Return the changes from `before` to `after`."""
    blocks, modules = tuple(_block_diffs(before, after)), tuple(_module_diffs(before, after))
    kept = {block.key for block in before.blocks} & {block.key for block in after.blocks}
    kept_modules = {module.fqn for module in before.modules} & {module.fqn for module in after.modules}
    return ModelDiff(
        before=f"{before.model_type}, {before.stage}",
        after=f"{after.model_type}, {after.stage}",
        blocks=blocks,
        modules=modules,
        num_same_blocks=len(kept) - sum(block.kind == "changed" for block in blocks),
        num_same_modules=len(kept_modules) - sum(module.kind == "changed" for module in modules),
    )


def _block_diffs(before: ModelDump, after: ModelDump) -> Iterator[BlockDiff]:
    old = {block.key: block for block in before.blocks}
    new = {block.key: block for block in after.blocks}
    for key, block in (new | old).items():
        kind: Kind = "removed" if key not in new else "added" if key not in old else "changed"
        nodes = tuple(_node_diffs(old[key], new[key])) if kind == "changed" else ()
        if nodes or kind != "changed":
            same = 0 if kind != "changed" else len(old[key].nodes) - sum(node.before is not None for node in nodes)
            yield BlockDiff(kind, key, block.class_name, block.layers, nodes, same)


def _node_diffs(before: BlockDump, after: BlockDump) -> Iterator[NodeDiff]:
    pairs = _paired(before, after)
    taken = set(pairs.values())
    new = {node.name: node for node in after.nodes}
    for node in before.nodes:
        if node.name not in pairs:
            yield NodeDiff("removed", node, None, ())
        elif changes := _changes(_renamed(node, pairs), new[pairs[node.name]]):
            yield NodeDiff("changed", node, new[pairs[node.name]], changes)
    for node in after.nodes:
        if node.name not in taken:
            yield NodeDiff("added", None, node, ())


def _renamed(node: NodeDump, pairs: dict[str, str]) -> NodeDump:
    """Return the old node with its inputs under their new names, so that a renamed input is not a change."""
    return replace(node, inputs=tuple(pairs.get(name, name) for name in node.inputs))


def _paired(before: BlockDump, after: BlockDump) -> dict[str, str]:
    """Map old names to new names: equal names first, then nodes with an FQN that is unique on both sides."""
    old, new = {node.name for node in before.nodes}, {node.name for node in after.nodes}
    pairs = {name: name for name in old & new}
    left, right = _by_fqn(before, old - new), _by_fqn(after, new - old)
    pairs.update({left[fqn]: right[fqn] for fqn in left.keys() & right.keys()})
    return pairs


def _by_fqn(block: BlockDump, names: set[str]) -> dict[str, str]:
    names_by_fqn: dict[str, list[str]] = {}
    for node in block.nodes:
        if node.name in names and node.fqn:
            names_by_fqn.setdefault(node.fqn, []).append(node.name)
    return {fqn: same[0] for fqn, same in names_by_fqn.items() if len(same) == 1}


def _module_diffs(before: ModelDump, after: ModelDump) -> Iterator[ModuleDiff]:
    old = {module.fqn: module for module in before.modules}
    new = {module.fqn: module for module in after.modules}
    for fqn in old | new:
        if fqn not in new or fqn not in old:
            yield ModuleDiff("added" if fqn in new else "removed", fqn, ())
        elif changes := _changes(old[fqn], new[fqn]):
            yield ModuleDiff("changed", fqn, changes)


def _changes(before: NodeDump | ModuleDump, after: NodeDump | ModuleDump) -> tuple[FieldChange, ...]:
    pairs = [(field.name, getattr(before, field.name), getattr(after, field.name)) for field in fields(before)]
    return tuple(FieldChange(name, _shown(old), _shown(new)) for name, old, new in pairs if old != new)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_shown(item) for item in cast("tuple[Any, ...]", value)) + "]"
    return "" if value is None else str(value)


def _block_lines(block: BlockDiff) -> Iterator[str]:
    sign = {"added": "+ ", "removed": "- ", "changed": ""}[block.kind]
    yield f"{sign}block {printable(block.key)}: {printable(block.class_name)}  {_layers(block)}".rstrip()
    alike: dict[str, list[str]] = {}
    moved = Counter[str]()
    for node in block.nodes:
        if node.kind == "changed":
            assert node.after is not None, "a changed node has both sides"
            if _is_move(node.changes):
                moved[_change_text(node.changes)] += 1
                continue
            alike.setdefault(_change_text(_main_changes(node.changes)), []).append(printable(node.after.name, 80))
        else:
            shown = node.before or node.after
            assert shown is not None, "a node of a difference has one side at least"
            yield f"  {'-' if node.kind == 'removed' else '+'} {_node_text(shown)}"
    for change, names in alike.items():
        yield f"  ~ {', '.join(names[:6])}{f' and {len(names) - 6} more' if len(names) > 6 else ''}: {change}"
    for change, count in moved.items():
        yield f"  ~ {_count(count, 'node')}: {change}"
    if block.num_same:
        yield f"  = {_count(block.num_same, 'node')} unchanged"


def _is_move(changes: tuple[FieldChange, ...]) -> bool:
    """Return whether the device is all that differs."""
    return [change.field for change in changes] == ["device"]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _main_changes(changes: tuple[FieldChange, ...]) -> tuple[FieldChange, ...]:
    """Return the changes of operator, rule, device and type; other changes only if there are no such changes."""
    first = tuple(c for c in changes if c.field in ("op", "shape", "dtype", "device", "rule"))
    return first or changes


def _module_lines(modules: tuple[ModuleDiff, ...]) -> Iterator[str]:
    folded = _folded(modules)
    groups: dict[tuple[str, str, int], list[str]] = {}
    for module in modules:
        if module.fqn in folded:
            sign = {"added": "+", "removed": "-", "changed": "~"}[module.kind]
            groups.setdefault((sign, _change_text(module.changes), folded[module.fqn]), []).append(module.fqn)
    for (sign, change, below), fqns in groups.items():
        for fqn in collapse(fqns):
            more = f" and {below} below" if below else ""
            yield f"  {sign} {fqn or 'the whole'}{more}" + (f": {change}" if change else "")


def _folded(modules: tuple[ModuleDiff, ...]) -> dict[str, int]:
    """Return the modules to list with the number of those below each that are left out.

    A module that only moved is left out below one that moved between the same devices.
    """
    moves = {module.fqn: _change_text(module.changes) for module in modules if _is_move(module.changes)}
    listed = {module.fqn: 0 for module in modules}
    for fqn, change in moves.items():
        around = [outer for outer in from_inside(fqn) if outer != fqn and moves.get(outer) == change]
        if around:
            del listed[fqn]
            listed[around[-1]] += 1
    return listed


def _change_text(changes: tuple[FieldChange, ...]) -> str:
    return ", ".join(
        f"{c.field} {printable(c.before, 80) or 'none'} -> {printable(c.after, 80) or 'none'}" for c in changes
    )


def _node_text(node: NodeDump) -> str:
    if node.op in WEIGHT:
        return f"weight {printable(node.fqn or node.name, 120)}: {type_text(node)}"
    kind, rule = type_text(node), rule_text(node)
    head = printable(node.name, 80) + (f": {kind}" if kind else "")
    return f"{head} = {call_text(node, {})}" + (f"  # {rule}" if rule else "")


def _layers(block: BlockDiff) -> str:
    return layers_text(BlockDump(block.key, block.class_name, (), block.layers, ()))
