"""The card of an adapter: README.md with its base model, data, settings and figures, and how it was made.

In: the report, the data and the settings of a finished run. Out: Markdown with the metadata that the Hugging Face hub
reads. Paths of the machine are shortened to their last part, because a card is published with its adapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ktc.foundation import resources
from ktc.foundation.files import write_file
from ktc.training.tune.data_sources import split_weight
from ktc.training.tune.examples import ReadSource
from ktc.training.tune.run_page import data_facts, facts
from ktc.training.tune.settings import TrainSettings

if TYPE_CHECKING:
    from ktc.training.trainers.run_report import RunReport
    from ktc.training.tune.types import PreparedData

CARD: Final = "README.md"
_METHODS: Final = {"sft": "supervised fine-tuning (SFT)", "dpo": "preferences (DPO)", "kto": "judged answers (KTO)"}
_OF_THE_MACHINE: Final = ("model", "file", "machine")  # facts that the card names otherwise, or leaves out
_MARKUP: Final = re.compile(r"[`|<>\[\]\r\n]")


def write_card(folder: Path, report: RunReport, data: PreparedData, settings: TrainSettings) -> None:
    """Write the card beside the adapter."""
    write_file(folder / CARD, card(folder.absolute().name, report, data, settings))


def card(title: str, report: RunReport, data: PreparedData, settings: TrainSettings) -> str:
    """Return the card as Markdown."""
    loader = FileSystemLoader(resources.templates() / "report")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    base = _model_name(report.model)
    parts = [data.train.summary] + ([data.held_out.summary] if data.held_out else [])
    by_name = dict[str, ReadSource]()
    for source in (source for part in parts for source in part.sources):
        by_name.setdefault(source.named, source)  # one that is split is in both parts, each time with all of its rows
    sources = list(by_name.values())
    return environment.get_template("card.md.j2").render(
        front=_front(report, sources, settings),
        title=_plain(title),
        base=base,
        base_text=repr(base),
        method=_METHODS[settings.method],
        data=[row for source in sources for row in _rows(source)],
        data_facts=[*_shared(data_facts(data.train.summary)), *_held_out(data, settings)],
        facts=list(_shared(facts(report))),
        settings=_public(settings, {source.named for source in sources if not source.digests}).to_yaml(),
    )


def _front(report: RunReport, sources: list[ReadSource], settings: TrainSettings) -> str:
    base, hub = _model_name(report.model), [source.named for source in sources if not source.digests]
    values: dict[str, Any] = {
        "base_model": base,
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["lora", "ktc", settings.method, *([] if "/" not in base else [f"base_model:adapter:{base}"])],
        **({"datasets": [named.partition(":")[0] for named in hub]} if hub else {}),
    }
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True).rstrip()


def _rows(source: ReadSource) -> Iterator[tuple[str, ...]]:
    """Yield a line for each file of a source, or one for a data set of the hub."""
    name = _name(source.named, is_hub=not source.digests)
    about = (name, ", ".join(source.formats), f"{source.rows:,}", f"{source.weight:g}")
    digests = source.digests or {"": ""}
    for number, (file, digest) in enumerate(digests.items()):
        yield (*(about if number == 0 else ("",) * len(about)), _plain(Path(file).name), digest)


def _shared(named: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    return ((name, _plain(value)) for name, value in named if name not in _OF_THE_MACHINE)


def _held_out(data: PreparedData, settings: TrainSettings) -> Iterator[tuple[str, str]]:
    """Yield the rows that are not learned, and where they come from."""
    if data.held_out is not None:
        split = f"of these sources, by `eval_split: {settings.eval_split:g}`"
        origin = "of `eval_data`" if settings.eval_data else split
        yield "held out", f"{data.held_out.summary.rows:,} rows {origin}"


def _public(settings: TrainSettings, hub: set[str]) -> TrainSettings:
    return replace(settings, data=_sources(settings.data, hub), eval_data=_sources(settings.eval_data, hub))


def _sources(names: tuple[str, ...], hub: set[str]) -> tuple[str, ...]:
    parts = (split_weight(name) for name in names)
    return tuple(
        _name(named, is_hub=named in hub) + ("" if weight is None else f":{weight:g}") for named, weight in parts
    )


def _model_name(model: str) -> str:
    is_path = Path(model).is_absolute() or model.startswith((".", "~")) or Path(model).exists() or model.count("/") != 1
    return _name(model, is_hub=not is_path)


def _name(named: str, *, is_hub: bool) -> str:
    """Return the last part of a path, and a name of the hub whole."""
    return _plain(named if is_hub else Path(named).name)


def _plain(text: str) -> str:
    """Return the text without characters that would be markup."""
    return _MARKUP.sub("_", text)
