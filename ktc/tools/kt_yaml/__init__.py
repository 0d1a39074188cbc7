"""KTransformers' optimize rules (YAML) as a rule program for one model.

The file is read without running anything that it names, replayed with first-match semantics on the module tree of the
model, emitted as facet rules, and the emitted program is verified module by module against the replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktc.diagnostics import Diagnostic, KtcError
from ktc.foundation.text_files import read_text
from ktc.language.dsl.printer import print_module
from ktc.stages.capture import CapturedModel, capture, open_model
from ktc.tools.kt_yaml import document
from ktc.tools.kt_yaml.document import printable
from ktc.tools.kt_yaml.effects import outcomes, trains
from ktc.tools.kt_yaml.emit import emit
from ktc.tools.kt_yaml.reach import find_reach
from ktc.tools.kt_yaml.replay import replay
from ktc.tools.kt_yaml.report import Report, make_report
from ktc.tools.kt_yaml.rules import KtRule, KtRules, read_rules
from ktc.tools.kt_yaml.verify import verify

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Imported", "Report", "Source", "import_for", "import_kt_yaml"]


@dataclass(frozen=True, slots=True)
class Imported:
    """The text of the `.ktr` file, `program`, and its report. `sources` holds the text that the warnings point into."""

    program: str
    report: Report
    warnings: tuple[Diagnostic, ...]
    sources: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return {"program": self.program, "report": self.report.to_json()}


def import_kt_yaml(path: Path, model: str | Path | PreTrainedModel) -> Imported:
    """Import the rules of a YAML file as a program for a model.

    Raises:
        InputRefused: the file (K001: not UTF-8, or too large) or the model is invalid; every fault is reported.
        ProofFailed: the program differs from the file.
    """
    text = read_text(path, unreadable="K001", not_utf8="K001", most_bytes=document.MAX_BYTES)
    source = Source(printable(path.name), text)
    read = source.rules()  # before loading the model, which takes seconds
    return import_for(source, read, capture(open_model(model, fetch_weights=False)))


@dataclass(frozen=True, slots=True)
class Source:
    """A file's text, and the name that places in it carry."""

    name: str
    text: str

    def rules(self) -> KtRules:
        """Return the rules of the file.

        Raises:
            InputRefused: the file is invalid; every fault is reported.
        """
        return read_rules(document.parse(self.text, self.name), self.name, self.text)


def import_for(source: Source, read: KtRules, captured: CapturedModel) -> Imported:
    """Import the rules of `source` as a program for a captured model. Raises as `import_kt_yaml` does."""
    try:
        replayed = replay(read.rules, captured.modules)
        effects = outcomes(replayed.visits, find_reach(captured))
        header = _header(source.name, read.rules, str(captured.facts["type"]))
        emitted = emit(effects, captured, "imported.ktr", header)
        verified = verify(emitted.module, effects, captured)
    except KtcError as error:
        raise type(error)(*error.diagnostics, sources={**error.sources, source.name: source.text}) from error
    report = make_report(source.name, read, replayed, effects, emitted.became, verified, captured)
    return Imported(print_module(emitted.module), report, read.warnings, {source.name: source.text})


def _header(file: str, rules: Sequence[KtRule], model_type: str) -> tuple[str, ...]:
    count = f"{len(rules)} rule{'s' * (len(rules) != 1)}"
    lines = (
        f"Imported from {file}: {count} of KTransformers, replayed on a {model_type} model.",
        "Numbers and lines below are those of that file.",
    )
    adapters = "It names no adapters: add a rule with `lora_linear` and a `lora` block."
    return (*lines, adapters) if trains(rules) else lines
