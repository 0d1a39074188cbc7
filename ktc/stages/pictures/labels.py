"""Labels that all drawings share: types, calls, layer ranges and site names, safe to print.

Input: values of `ktc.stages.pictures.dump`, whose strings come from untrusted model files. Output: single-line text
without control characters. The drawing that embeds it escapes it for HTML, SVG or DOT.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from ktc.foundation.module_paths import from_inside, ranges
from ktc.stages.pictures.dump import BlockDump, ModelDump, NodeDump

WEIGHT = frozenset({"weight", "buffer"})
# Operators that only move, rename, cast or measure a value: drawn small; their sizes follow from the type.
QUIET = frozenset({
    "reshape", "view", "unsqueeze", "squeeze", "expand", "permute", "transpose", "cast", "clone", "alias", "detach",
    "contiguous", "flatten", "unflatten", "repeat", "dropout", "split", "getitem", "slice", "cat", "copy",
    "slice_scatter", "zeros_like", "full_like", "new_empty",
})  # fmt: skip
_SIZES = frozenset({"size", "sizes", "shape", "split_size", "split_sizes"})
_TOLD = frozenset({"folds", "in_features", "out_features"})  # by the picture of the region, by the types
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_LONG_FLOAT = re.compile(r"-?\d+\.\d{6,}(e[+-]?\d+)?")
_ITEM = re.compile(r"\[\d+\]$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def printable(text: str, limit: int = 200) -> str:
    """Return `text` on one line: control and direction characters escaped, text beyond `limit` cut from the middle."""
    shown = _UNPRINTABLE.sub(lambda character: character.group().encode("unicode_escape").decode("ascii"), text)
    if len(shown) <= limit:
        return shown
    tail = (limit - 1) // 2
    return f"{shown[: limit - 1 - tail]}…{shown[len(shown) - tail :]}"


def type_text(node: NodeDump) -> str:
    """Return a type such as `bf16[b, s, 2048]`, empty for a value other than a single tensor."""
    if node.shape is None:
        return printable(node.dtype)
    return printable(f"{node.dtype}[{', '.join(str(size) for size in node.shape)}]")


def is_size(node: NodeDump) -> bool:
    """Return whether the node is a size read from a shape: neither drawn nor listed as an operand."""
    return node.op.startswith("sym_") or (node.target.startswith("_operator.") and not node.dtype)


def operands(node: NodeDump, nodes: dict[str, NodeDump]) -> tuple[str, ...]:
    """Return the operands as in code: a weight by its FQN, any other value by its node name, without sizes."""
    named: list[str] = []
    for name in node.inputs:
        source = nodes.get(name)
        if source is not None and is_size(source):
            continue
        named.append(source.fqn or name if source is not None and source.op in WEIGHT else name)
    return tuple(printable(name, 80) for name in named)


def call_text(node: NodeDump, nodes: dict[str, NodeDump]) -> str:
    """Return a call such as `topk(scores, k=6, sorted=False)`; a part of a tuple is `topk[1]`."""
    named = operands(node, nodes)
    if (index := item_index(node)) and len(named) == 1:
        return f"{named[0]}[{index}]"
    return f"{printable(node.op, 60)}({', '.join([*named, *settings(node)])})"


def settings(node: NodeDump) -> tuple[str, ...]:
    """Return attributes such as `k=6`, `dim=-1`, without sizes in the node's type and contents of a folded region."""
    return tuple(
        f"{printable(name, 40)}={_number_text(printable(value, 80))}"
        for name, value in node.attributes
        if not (name in _SIZES and node.op in QUIET) and name not in _TOLD
    )


def item_index(node: NodeDump) -> str:
    """Return the constant index of a `getitem`, otherwise empty."""
    if node.op != "getitem" or len(node.attributes) != 1:
        return ""
    return printable(node.attributes[0][1], 20)


def _number_text(text: str) -> str:
    """Return a float with six digits, enough to recognise it; other text unchanged."""
    return f"{float(text):.6g}" if _LONG_FLOAT.fullmatch(text) else text


def home_device(block: BlockDump) -> str:
    """Return the device of most nodes of the block, empty before placement; shown once per block."""
    devices = Counter(node.device for node in block.nodes)
    return printable(devices.most_common(1)[0][0], 40) if devices else ""


def rule_text(node: NodeDump, home: str = "", *, span: bool = True) -> str:
    """Return `rule experts (moe-lora.ktr:12:3) -> cpu`; without a rule `on cuda:0` if not on device `home`."""
    device = printable(node.device, 40)
    if not node.rule:
        return f"on {device}" if device and device != home else ""
    where = f" ({printable(node.span)})" if node.span and span else ""
    return f"rule {printable(node.rule, 60)}{where}" + (f" -> {device}" if device else "")


def layers_text(block: BlockDump) -> str:
    """Return `layers 1..26`, `layer 0`, or empty for a block outside the layers."""
    if not block.layers:
        return ""
    return f"layer{'s' if len(block.layers) > 1 else ''} {ranges(block.layers)}"


def collapse(fqns: Sequence[str]) -> tuple[str, ...]:
    """Merge FQNs that differ in their first number only: `model.layers.[1..26].mlp`."""
    groups: dict[tuple[str, str], list[int]] = {}
    for fqn in fqns:
        number = _NUMBER.search(fqn)
        if number is None:
            groups.setdefault((fqn, ""), [])
        else:
            groups.setdefault((fqn[: number.start()], fqn[number.end() :]), []).append(int(number.group()))
    return tuple(
        printable(f"{head}{_bracketed(numbers)}{tail}" if numbers else head) for (head, tail), numbers in groups.items()
    )


def _bracketed(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"[{ranges(numbers)}]"


def quantity(number: float, unit: str = "") -> str:
    """Return `15.7 G` of parameters, `31.4 GB`: three digits and a power of 1000."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {prefix}{unit}"
    return f"{number:.0f} {unit}".rstrip()


def rule_names(dumps: Iterable[ModelDump]) -> tuple[str, ...]:
    """Return every rule in the dumps, in order of appearance; its position determines its colour in all drawings."""
    rules: dict[str, None] = {}
    for dump in dumps:
        rules.update((match.rule, None) for match in dump.matches)
        rules.update((node.rule, None) for block in dump.blocks for node in block.nodes if node.rule)
        rules.update((module.rule, None) for module in dump.modules if module.rule)
    return tuple(rules)


def captured_nodes(block: BlockDump, dump: ModelDump) -> dict[str, tuple[tuple[str, str], ...]]:
    """Return, for each node of the block bound by a match, the (rule, name in the pattern) pairs, each once.

    A match belongs to the block that contains its site; `topk[1]`, a part of a tuple, is the node `topk`.
    """
    captures: dict[str, dict[tuple[str, str], None]] = {}
    sites = set(block.sites)
    for match in dump.matches:
        if any(site in sites for site in from_inside(match.site)):
            for name, node in match.captures:
                captures.setdefault(_ITEM.sub("", node), {})[match.rule, name] = None
    return {node: tuple(pairs) for node, pairs in captures.items()}
