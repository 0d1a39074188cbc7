"""The census as a Markdown page: totals, one row per family, and the reasons of families not matched or proven.

Input: a `Census` and its date. Output: Markdown.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from datetime import date

from census.types import MATCHED, Census, Family, TwinProof

COLUMNS = (
    "family", "experts", "proven", "whole twin", "forward", "gradient", "routing", "activation", "shared experts",
    "attention",
)  # fmt: skip
TWIN_COLUMNS = ("logits", "tokens", "LoRA gradients")  # of each program


def markdown(census: Census, day: date) -> str:
    """Return the page docs/reference/families.md, which `ktc census --format markdown` prints."""
    return "\n".join([*_head(census, day), *_tables(census), "", *_twins(census), *_reasons(census), ""])


_ABOUT = """\
Every family of the installed transformers that has routed experts, as a twin: its own default
config with small sizes, captured, matched by the bundled `moe-lora` program, rewritten, and
compared in fp32 with the original: every rewritten module at its place, and the whole model.

* *Experts*: whether those of every layer are rewritten.
* *Whole twin*: the program realised in the whole model by the loader's code, in reference mode,
  beside stock; see the second table.
* *Forward*, *gradient*: the worst relative error of outputs and of all gradients over all
  rewrites, attention included.
* *Routing*: the router's computation; "own code" runs unchanged, before the rewritten experts.
* *Attention*: the pattern of each distinct block. The core of a recurrent layer runs as stock, its
  projections are adapted. Linear, opaque or "own code" attention is unchanged.
"""


def _head(census: Census, day: date) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in census.versions.items())
    counts = census.counts_of(towers=False)
    yield "# Census of mixture-of-experts families"
    yield ""
    yield f"Written by `ktc census --format markdown -o docs/reference/families.md` on {day.isoformat()}."
    yield f"Versions: {versions}."
    yield ""
    yield _ABOUT
    if len(census.families) < census.asked:
        yield f"**Interrupted: {census.asked} families were requested.** "
    at_a_time = "one family" if census.jobs == 1 else f"{census.jobs} families"
    yield textwrap.fill(
        f"{counts['families']} families: {counts['matched']} with their experts rewritten, {counts['proven']} of them "
        f"proven, {counts['routing']} with the routing recognised, {counts['attention']} with all their softmax "
        f"attention recognised, {counts['equal']} equal as whole twins, {counts['wrong']} wrong. "
        f"It took {census.seconds / 60:.0f} minutes, {at_a_time} at a time.",
        98,
    )
    yield ""


_ABOUT_TOWERS = """\
The class of images and text, whole, as a twin: with small towers that run as their own code, and an
image of random pixels. *With an image*: logits, tokens of an answer and gradients of all LoRA
factors equal stock's. Settings that the defaults of a family leave open are those of its
checkpoints.
"""


def _tables(census: Census) -> Iterator[str]:
    """Yield the table of models of text, and the one of models that read images."""
    yield from table([family for family in census.families if not family.towers])
    whole = [family for family in census.families if family.towers]
    if not whole:
        return
    counts = census.counts_of(towers=True)
    yield ""
    yield "## Models that read images"
    yield ""
    yield _ABOUT_TOWERS
    yield textwrap.fill(
        f"{counts['families']} families: {counts['matched']} with their experts rewritten, {counts['proven']} of them "
        f"proven, {counts['equal']} equal as whole twins in both programs, {counts['image']} equal with an image in "
        f"each program that applies.",
        98,
    )  # fmt: skip
    yield ""
    columns = (*COLUMNS[:4], "with an image", *COLUMNS[4:])
    yield _line(columns)
    yield _line("---" for _ in columns)
    for family in whole:
        before, after = cells(family)[:4], cells(family)[4:]
        yield _line((*before, _image_verdict(family), *after))


def _image_verdict(family: Family) -> str:
    if family.sees:
        return "equal" if family.equal else "equal where compared"
    return "none made" if family.equal else "no"


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
        _verdict(family), _twin_verdict(family), _error(family.worst_forward), _error(family.worst_gradient),
        f"{own}{family.router}" if family.router else "", family.activation, family.shared_experts,
        ", ".join(family.attention_kinds),
    )  # fmt: skip


def _verdict(family: Family) -> str:
    if family.wrong:
        return "WRONG"
    if family.proven:
        return "yes" if family.matched else "attention only"
    return "no"


def _twin_verdict(family: Family) -> str:
    if any(proof.wrong for proof in family.twins):
        return "WRONG"
    if family.equal:
        return "equal"
    return "equal where compared" if any(proof.equal for proof in family.twins) else "no"


def _error(error: float | None) -> str:
    if error is None:
        return ""
    return f"{error:.0e}" if error else "0"


_ABOUT_TWINS = """\
Each bundled program, realised in the whole twin: logits with and without left padding and with a
cache, tokens of greedy decoding with left padding, and gradients of all LoRA factors in train mode
with random factors. Errors are relative, the worst of all; a difference in fp32 is decided in fp64.
"""


def _twins(census: Census) -> Iterator[str]:
    """Yield the second table: the whole twin in every program."""
    programs = list(dict.fromkeys(proof.program for family in census.families for proof in family.twins))
    if not programs:
        return
    yield "## Whole twins"
    yield ""
    yield _ABOUT_TWINS
    yield _line(("family", *(f"`{program}`: {name}" for program in programs for name in TWIN_COLUMNS)))
    yield _line("---" for _ in range(1 + len(programs) * len(TWIN_COLUMNS)))
    for family in census.families:
        found = {proof.program: proof for proof in family.twins}
        yield _line((family.family, *(cell for program in programs for cell in _twin_cells(found.get(program)))))
    yield ""
    for family in census.families:
        for proof in family.twins:
            if left := "; ".join(_escaped(words) for words in (proof.failure, *proof.notes) if words):
                yield _wrapped(f"* **{family.family}**, `{proof.program}`: {left}")
    yield ""


def _twin_cells(proof: TwinProof | None) -> tuple[str, ...]:
    if proof is None or proof.failure:
        return ("",) * len(TWIN_COLUMNS)
    wrong = "WRONG " if proof.wrong else ""
    tokens = "" if proof.tokens is None else "same" if proof.tokens else "other"
    return f"{wrong}{_error(proof.logits)}", tokens, _error(proof.worst_gradient)


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
