"""The census as a Markdown page: totals, one row per family, and the reasons of families not matched or proven.

Input: a `Census` and its date. Output: Markdown.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from datetime import date

from ktc.census.types import MATCHED, Census, Family

COLUMNS = (
    "family", "experts", "proven", "forward", "gradient", "routing", "activation", "shared experts", "attention",
)  # fmt: skip


def markdown(census: Census, day: date) -> str:
    """Return the page docs/census.md, which `ktc census --format markdown` prints."""
    return "\n".join([*_head(census, day), *table(census.families), "", *_reasons(census), ""])


_ABOUT = """\
Every family of the installed transformers that has routed experts, as a twin: its own default
config with small sizes, captured, matched by the bundled `moe-lora` program, rewritten, and
compared in fp32 with the original, block by block.

* *Experts*: whether those of every layer are rewritten.
* *Forward*, *gradient*: the worst relative error of outputs and of all gradients over all
  rewrites, attention included.
* *Routing*: the router's computation; "own code" runs unchanged, before the rewritten experts.
* *Attention*: the pattern of each distinct block; linear, opaque or "own code" attention is
  unchanged.
"""


def _head(census: Census, day: date) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in census.versions.items())
    counts = census.counts()
    yield "# Census of mixture-of-experts families"
    yield ""
    yield f"Written by `ktc census --format markdown -o docs/census.md` on {day.isoformat()}."
    yield f"Versions: {versions}."
    yield ""
    yield _ABOUT
    if len(census.families) < census.asked:
        yield f"**Interrupted: {census.asked} families were requested.** "
    yield (
        f"{counts['families']} families: {counts['matched']} with their experts rewritten, {counts['proven']} of them "
        f"proven,\n{counts['routing']} with the routing recognised, {counts['attention']} with all their softmax "
        f"attention recognised, {counts['wrong']} wrong.\n"
        f"It took {census.seconds / 60:.0f} minutes, {census.jobs} families at a time."
    )
    yield ""


def table(families: Sequence[Family]) -> Iterator[str]:
    """Yield the lines of the table, one family each."""
    yield _line(COLUMNS)
    yield _line("---" for _ in COLUMNS)
    for family in families:
        yield _line(cells(family))


def _line(cells: Sequence[str] | Iterator[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def cells(family: Family) -> tuple[str, ...]:
    """Return one row of the table, in the order of `COLUMNS`."""
    own = "" if family.routing == MATCHED else "own code: "
    return (
        family.family, "rewritten" if family.matched else family.experts.partition(":")[0],
        _verdict(family), _error(family.worst_forward), _error(family.worst_gradient),
        f"{own}{family.router}" if family.router else "", family.activation, family.shared_experts,
        ", ".join(family.attention_kinds),
    )  # fmt: skip


def _verdict(family: Family) -> str:
    if family.wrong:
        return "WRONG"
    if family.proven:
        return "yes" if family.matched else "attention only"
    return "no"


def _error(error: float | None) -> str:
    if error is None:
        return ""
    return f"{error:.0e}" if error else "0"


def _reasons(census: Census) -> Iterator[str]:
    told = [family for family in census.families if family.reasons]
    if not told:
        return
    yield "## Families not matched or proven"
    yield ""
    for family in told:
        reasons = "; ".join(_escaped(reason) for reason in family.reasons)
        yield _wrapped(f"* **{family.family}**: {reasons}")


def _wrapped(item: str) -> str:
    """Wrap a list item at 100 columns; words are never split."""
    return textwrap.fill(item, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("*", "\\*").replace("<", "\\<")
