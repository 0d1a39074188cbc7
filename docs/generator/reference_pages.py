"""The reference pages that the code itself has the facts of: commands, rules, diagnostics.

In: the typer application, the vocabulary of the rule language, the bundled programs, the explanations of codes. Out:
the Markdown of each page by its path below `docs/`. `docs/generator/hooks.py` adds them to the site, and the tests of
links read them, so that no copy in the repository can be old. Nothing here imports torch.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import typer

from ktc.cli.app import app
from ktc.foundation import resources
from ktc.language import explain
from ktc.language.dsl import bundled, schema
from ktc.language.dsl.settings import SettingSpec
from ktc.model.targets import ROWS
from ktc.model.targets.target import Target

MADE: Final = "<!-- Made from the code by docs/generator/reference_pages.py. -->\n\n"
_COLUMNS: Final = 92  # of a help page in its block
_HEAD = re.compile(r"^## ((?:[A-Z]\d{3} )+)(.+)$", re.MULTILINE)
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_EXAMPLE = re.compile(r"^```(\w+) (bad|good)$", re.MULTILINE)
_PATTERN = re.compile(r"^pattern (\w+)\((.*?)\) -> (.*?)(?: is (\w+))? \{", re.MULTILINE)
_PARAMETER = re.compile(r"^param (\w+) *: *(\S+) *= *([^#\n]+?) *(?:# *(.*))?$", re.MULTILINE)


def pages() -> dict[str, str]:
    """Return the text of each generated page by its path below `docs/`."""
    made = {"commands": commands_page(), "targets": targets_page(), "diagnostics": diagnostics_page()}
    return {f"reference/{name}.md": MADE + text for name, text in made.items()}


# Commands ------------------------------------------------------------------------------------------------------------
def commands_page() -> str:
    """Return the help of every command, in the order and the groups of `ktc --help`."""
    root: Any = typer.main.get_command(app)
    intro = (
        "# Commands\n\nEach block is the answer of `ktc COMMAND --help`. Exit codes: 0 done; 1 a bug, or a proof "
        "that failed; 2 input refused; 3 the host lacks something; 130 interrupted.\n"
    )
    parts, group = [intro], None
    for names, command in _leaves(root, ("ktc",)):
        panel = getattr(root.commands[names[1]], "rich_help_panel", None)
        if panel != group:
            parts.append(f"## {panel}\n")
            group = panel
        parts.append(f"### {' '.join(names)}\n\n```text\n{_help(command, names)}\n```\n")
    return "\n".join(parts)


def _leaves(command: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield names, command
        return
    for name, inner in command.commands.items():
        if not inner.hidden:
            yield from _leaves(inner, (*names, name))


def _help(command: Any, names: tuple[str, ...]) -> str:
    context = command.make_context(" ".join(names), [], resilient_parsing=True)
    context.terminal_width, context.max_content_width = _COLUMNS, _COLUMNS
    return "\n".join(line.rstrip() for line in command.get_help(context).strip().splitlines())


# Rules ---------------------------------------------------------------------------------------------------------------
def targets_page() -> str:
    """Return the targets with their settings, the patterns, the programs, and every word of the language."""
    sections = (
        "# Targets, patterns and words of rules\n\n[The rule language](language.md) says how these are written.\n",
        "## Targets\n",
        *(_target(target) for target in ROWS),
        "## Programs\n\n`--set NAME=VALUE` gives a parameter another value.\n",
        *(_program(name) for name in bundled()),
        "## Patterns of the library\n",
        *(_library(path) for path in sorted((resources.rules() / "std").glob("*.ktr"))),
        "## Roles\n",
        _table(("role", "certain captures", "optional", "attributes"), _roles()),
        "## Facts and attributes\n",
        _table(("of", "names"), _facts()),
        "## Keys of blocks\n\n`plan` also takes a size for each device: its budget.\n",
        _table(("block", "key", "type"), _keys()),
        "## Operators\n",
        _table(("operator", "operands", "attributes"), _operators()),
        "## Words of each type\n",
        _table(("type", "words"), ((f"`{name}`", _code(words)) for name, words in schema.ENUMS.items())),
        "## Reserved words\n",
        _code(sorted(schema.KEYWORDS)) + "\n",
    )
    return "\n".join(sections)


def _target(target: type[Target]) -> str:
    module = inspect.getdoc(sys.modules[target.__module__]) or ""
    own = inspect.getdoc(target) or ""
    about = module.partition(":")[2].strip() if module.startswith(f"`{target.name}`:") else module
    accepts = "anything" if "*" in target.accepts else _code(target.accepts)
    facet = target.fixed_facet or "the one that it names"
    settings = schema.SETTINGS[target.name]
    absorbs = f" It absorbs {_code(target.consumes)}." if target.consumes else ""
    hosts = f" It carries out {_code(target.fuses)} itself." if target.fuses else ""
    text = f"### {target.name}\n\n{_sentence(about)}\n\nFacet: {facet}. On: {accepts}.{absorbs}{hosts}\n"
    if settings:
        text += f"\n{own}\n\n" + _table(("setting", "type", "default"), _settings(settings))
    return text


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _settings(settings: Mapping[str, SettingSpec]) -> Iterator[tuple[str, str, str]]:
    for name, spec in settings.items():
        bounds = f", {_number(spec.bounds.low)} to {_number(spec.bounds.high)}" if spec.bounds else ""
        default = (
            "must be given" if spec.required else "chosen" if spec.default is None else f"`{_value(spec.default)}`"
        )
        yield f"`{name}`", f"`{spec.type}`{bounds}", default


def _number(bound: float) -> str:
    return f"{bound:,.0f}" if bound == int(bound) else str(bound)


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _program(name: str) -> str:
    source = (resources.rules() / f"{name}.ktr").read_text(encoding="utf-8")
    rows = ((f"`{word}`", f"`{kind}`", f"`{value}`", note) for word, kind, value, note in _PARAMETER.findall(source))
    return f"### {name}\n\n{_first_comment(source)}\n\n" + _table(("parameter", "type", "default", ""), rows)


def _library(path: Path) -> str:
    source = path.read_text(encoding="utf-8")
    rows = (
        (f"`{name}`", f"`{inputs}`", f"`{outputs}`", f"`{role}`" if role else "")
        for name, inputs, outputs, role in _PATTERN.findall(source)
    )
    return f"### std/{path.name}\n\n" + _table(("pattern", "inputs", "outputs", "role"), rows)


def _first_comment(source: str) -> str:
    return " ".join(line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), source.splitlines()))


def _roles() -> Iterator[tuple[str, ...]]:
    for name, role in schema.ROLES.items():
        yield f"`{name}`", _code(role.members), _code(role.optional), _code(role.attributes)


def _facts() -> Iterator[tuple[str, str]]:
    yield from ((f"`{topic}`", _code(facts)) for topic, facts in schema.FACTS.items())
    yield "every capture", _code(schema.CAPTURE_ATTRIBUTES)
    yield from ((f"`{kind}`", _code(names)) for kind, names in schema.KIND_ATTRIBUTES.items() if names)


def _keys() -> Iterator[tuple[str, str, str]]:
    for block, keys in schema.BLOCKS.items():
        yield from ((f"`{block}`", f"`{key}`", f"`{kind}`") for key, kind in keys.items())


def _operators() -> Iterator[tuple[str, str, str]]:
    for name, operator in schema.OPERATORS.items():
        fewest, most = operator.operands
        count = str(fewest) if fewest == most else f"{fewest} or more" if most is None else f"{fewest} to {most}"
        yield f"`{name}`", count, _code(operator.attributes)


def _code(words: Iterable[str]) -> str:
    return " ".join(f"`{word}`" for word in words)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = [*head]
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# Diagnostics ---------------------------------------------------------------------------------------------------------
def diagnostics_page() -> str:
    """Return every code with its explanation and examples, as `ktc explain CODE` prints them."""
    intro = "# Diagnostics\n\nA message begins with its code; `ktc explain CODE` prints the same text.\n"
    texts = sorted(Path(explain.__file__).parent.glob("*.md"))
    return "\n".join((intro, *(_explained(path.read_text(encoding="utf-8")) for path in texts)))


def _explained(text: str) -> str:
    text = _HEAD.sub(_section, _TITLE.sub(r"## \1", text, count=1))
    return _EXAMPLE.sub(r'```\1 title="\2"', text)


def _section(head: re.Match[str]) -> str:
    first, *others = head[1].split()
    anchors = "".join(f'<a id="{code.lower()}"></a>' for code in others)
    return f"{anchors}\n\n### {head[1].strip()}: {head[2]} {{ #{first.lower()} }}".lstrip()
