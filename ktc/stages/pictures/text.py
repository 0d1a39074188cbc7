"""A stage as text that resembles code: the module tree, then each block as a function, then matches and near misses.

Input: a `ModelDump`, optionally one layer number. Output: one string, plain or with ANSI colours. Strings of the model
are printed without control characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from ktc.stages.pictures.dump import BlockDump, MatchDump, ModelDump, NodeDump
from ktc.stages.pictures.labels import (
    WEIGHT,
    call_text,
    collapse,
    home_device,
    is_size,
    layers_text,
    printable,
    quantity,
    rule_text,
    type_text,
)
from ktc.stages.pictures.measured import Measured, Verdict, of_block, of_model
from ktc.stages.pictures.module_tree import TreeLine, module_tree

_RULE, _TYPE, _NAME, _HEAD, _NOTE, _RED = "bold magenta", "green", "bold", "bold cyan", "yellow", "bold red"


def render_text(
    dump: ModelDump, layer: int | None = None, *, colour: bool = False, measured: Sequence[Measured] = ()
) -> str:
    """Return the whole stage, or the blocks of `layer`. Ends with a newline."""
    lines = [Text(f"{printable(dump.model_type)} ({printable(dump.dtype)}), {dump.stage}", _HEAD)]
    lines += [*_verdict(of_model(measured), ""), Text()]
    if layer is None and dump.modules:
        lines += [*_modules(module_tree(dump.modules)), Text()]
    for block in dump.of_layer(layer):
        lines += [*_block(block, of_block(block, measured, layer)), Text()]
    lines += _matches(dump.matches) if layer is None else ()
    lines += _near_misses(dump.near_misses) if layer is None else ()
    return _join(lines, colour)


def render_block(block: BlockDump) -> str:
    return _join(list(_block(block)), colour=False)


def node_line(node: NodeDump, nodes: dict[str, NodeDump], home: str = "") -> Text:
    """Return a line such as `gate: f32[b*s, 64] = linear(hidden, gate.weight)  # rule ...`."""
    line = Text.assemble((printable(node.name, 80), _NAME))
    if kind := type_text(node):
        line.append(": ").append(kind, _TYPE)
    line.append(" = ").append(call_text(node, nodes))
    if rule := rule_text(node, home):
        line.append(f"  # {rule}", _RULE)
    return line


def block_title(block: BlockDump) -> str:
    """Return a title such as `block mlp_1: DeepseekV2Moe  layers 1..26  on cuda:0`."""
    home = home_device(block)
    parts = (layers_text(block), f"on {home}" if home else "")
    return "  ".join([f"block {printable(block.key, 80)}: {printable(block.class_name, 80)}", *filter(None, parts)])


def _verdict(verdict: Verdict | None, indent: str) -> Iterator[Text]:
    if verdict is not None:
        yield from (Text(f"{indent}{line}", _RED if verdict.red else _TYPE) for line in verdict.lines)


def _block(block: BlockDump, verdict: Verdict | None = None) -> Iterator[Text]:
    nodes = {node.name: node for node in block.nodes}
    yield Text(block_title(block), _HEAD)
    yield from _verdict(verdict, "  ")
    for site in collapse(block.sites):
        yield Text(f"  at {site}", "dim")
    for word, ops in (("input", {"input"}), ("weight", WEIGHT)):
        for node in block.nodes:
            if node.op in ops:
                line = Text.assemble(f"  {word} ", (printable(node.fqn or node.name, 120), _NAME))
                yield line.append(": ").append(type_text(node), _TYPE) if type_text(node) else line
    for node in block.nodes:
        if node.op == "output":
            yield Text(f"  return {', '.join(printable(name, 80) for name in node.inputs)}")
        elif node.op != "input" and node.op not in WEIGHT and not is_size(node):
            yield Text("  ").append_text(node_line(node, nodes, home_device(block)))
    for note in block.notes:
        yield Text(f"  note: {printable(note, 400)}", _NOTE)


def _modules(lines: tuple[TreeLine, ...]) -> Iterator[Text]:
    """Yield rows: the indented name, its class, parameters and bytes (of all copies together), device, rule."""
    names = [f"{'  ' * line.depth}{line.name}" for line in lines]
    classes = [f"{line.class_name} x {line.copies}" if line.copies > 1 else line.class_name for line in lines]
    name_width, class_width = max(map(len, names)), max(map(len, classes))
    yield Text(f"{'modules':<{name_width}}  {'':<{class_width}}  {'parameters':>10}  {'size':>8}", "bold")
    for line, name, class_name in zip(lines, names, classes, strict=True):
        total = (quantity(line.parameters * line.copies), quantity(line.bytes * line.copies, "B"))
        counts = total if line.parameters else ("", "")
        row = Text.assemble(f"{name:<{name_width}}  ", (f"{class_name:<{class_width}}", "dim"))
        row.append(f"  {counts[0]:>10}  {counts[1]:>8}", _TYPE)
        row.append(f"  {line.device}" if line.device else "")
        row.append(f"  # rule {line.rule}" if line.rule else "", _RULE)
        row.rstrip()
        yield row


def _matches(matches: tuple[MatchDump, ...]) -> Iterator[Text]:
    """Yield one line for each group of matches that differ only in their layer."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for match in matches:
        bound = ", ".join(f"{printable(name, 40)}={printable(node, 60)}" for name, node in match.captures)
        groups.setdefault((match.rule, match.pattern, bound), []).append(match.site)
    if groups:
        yield Text("matches", "bold")
    for (rule, pattern, bound), sites in groups.items():
        for site in collapse(sites):
            line = Text.assemble("  ", (f"rule {printable(rule, 60)}", _RULE), f" at {site}")
            yield line.append(f"  {printable(pattern, 60)}({bound})", "dim")
    if groups:
        yield Text()


def _near_misses(reasons: tuple[str, ...]) -> Iterator[Text]:
    if reasons:
        yield Text("near misses", "bold")
    for reason in reasons:
        yield Text(f"  {printable(reason, 400)}", _NOTE)


def _join(lines: list[Text], colour: bool) -> str:
    while lines and not lines[-1].plain:
        lines.pop()
    if not colour:
        return "\n".join(line.plain.rstrip() for line in lines) + "\n"
    console = Console(force_terminal=True, color_system="standard", no_color=False, width=100_000, highlight=False)
    with console.capture() as capture:
        for line in lines:
            console.print(line, soft_wrap=True)
    return capture.get()
