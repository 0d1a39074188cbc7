"""The settings of a training run: one frozen dataclass, whose fields are flags of `ktc train` and keys of a YAML file.

In: a YAML file, flags, or both (flags win). Out: `TrainSettings`, and its text for `train.yaml`. Refused, all of a file
together and with their lines: text that is not YAML (T501), unknown and repeated keys (T502), values of another type or
out of range (T503).
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import yaml

from ktc.diagnostics import Diagnostic, InputRefused, Span, listing, suggest
from ktc.foundation.text_files import read_text

Format = Literal["auto", "alpaca", "sharegpt", "messages", "prompt", "text"]
Method = Literal["sft", "dpo", "kto"]
Template = Literal["auto", "plain"]
Scheduler = Literal["linear", "cosine", "constant", "constant_with_warmup"]
Precision = Literal["bf16", "fp32"]
Stack = Literal["auto", "on", "off"]
REPORTERS = ("wandb", "mlflow", "tensorboard")
_MOST_BYTES = 1 << 20


def _setting(
    default: object, text: str, *, low: float | None = None, above: float | None = None, repeats: bool = False
) -> Any:
    """Make a field with its help; values must be at least `low` and below `above`.

    A flag that `repeats` is given once for each value, and its key of the YAML file may have one value alone.
    """
    return field(default=default, metadata={"help": text, "low": low, "above": above, "repeats": repeats})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Every setting with its default. Lengths count tokens, sizes of batches sequences, and all steps are updates."""

    data: tuple[str, ...] = _setting(
        (),
        "Training data: a file (.jsonl, .csv, .parquet, ...), folder, pattern, owner/name of the hub, or `capitals`, "
        "which ktc ships. It repeats; DATA:2 takes rows twice.",
        repeats=True,
    )
    method: Method = _setting("sft", "sft learns answers; dpo learns pairs of them, and kto judged ones.")
    beta: float | None = _setting(
        None, "Of dpo and kto: how much the model stays as it was before; default: 0.1.", low=0
    )
    format: Format = _setting("auto", "The format of the data; detected from its keys by default.")
    column: tuple[str, ...] = _setting(
        (), "Take NAME of the format from this column of the data: prompt=question. It repeats.", repeats=True
    )
    template: Template = _setting("auto", "auto: the tokenizer's chat template; plain: texts joined without one.")
    eval_data: tuple[str, ...] = _setting((), "Held-out data, named in the same way.", repeats=True)
    eval_split: float = _setting(0.0, "Share of the data to hold out if there is no eval file.", low=0, above=1)
    streaming: bool = _setting(
        False, "Read rows one by one, and keep their tokens on disk (TMPDIR): for data larger than the memory."
    )
    length: int = _setting(512, "Longest sequence.", low=2)
    truncate: bool = _setting(False, "Cut longer sequences; otherwise they are refused.")
    packing: bool = _setting(False, "Pack short sequences into one of full length; they do not see each other.")
    train_on_prompt: bool = _setting(False, "Train on the questions too; by default only on the answers.")
    rank: int | None = _setting(None, "LoRA's rank; default: the rules' rank, or 8.", low=1)
    alpha: float | None = _setting(None, "LoRA's alpha; default: the rules' alpha, or 32.", low=0)
    dropout: float | None = _setting(None, "LoRA's dropout; default: the rules' dropout, or 0.1.", low=0, above=1)
    rslora: bool | None = _setting(None, "Scale LoRA by alpha / sqrt(rank).")
    targets: tuple[str, ...] = _setting(
        (),
        "Linear layers to adapt, instead of those of the rules; all-linear: the layers that PEFT adapts on the stock "
        "model (attention, routers ...), without the routed experts.",
    )
    learning_rate: float = _setting(1e-4, "Peak learning rate.", low=0)
    scheduler: Scheduler = _setting("cosine", "Schedule of the learning rate.")
    warmup: float = _setting(0.03, "Steps of warm-up; below 1 a share of all steps.", low=0)
    weight_decay: float = _setting(0.0, "Weight decay of AdamW.", low=0)
    max_grad_norm: float = _setting(1.0, "Clip gradients to this norm; 0: no clipping.", low=0)
    epochs: float = _setting(3.0, "Passes over the data.", low=0)
    max_steps: int | None = _setting(None, "Stop after this number of steps; overrides `epochs`.", low=1)
    batch: int = _setting(1, "Sequences per micro-batch and process.", low=1)
    accumulation: int = _setting(16, "Micro-batches per step.", low=1)
    processes: int | None = _setting(
        None, "Processes here, each with a GPU, that share the micro-batches of a step; default: as planned.", low=1,
        above=1025,
    )  # fmt: skip
    precision: Precision = _setting("bf16", "fp32 runs the reference operators: exact and slow.")
    gradient_checkpointing: bool = _setting(False, "Recompute activations in backward: less memory, more time.")
    stack: Stack = _setting("auto", "Run a step's micro-batches through each layer's experts together.")
    router_aux_loss: float = _setting(0.0, "Weight of the router's load-balancing loss.", low=0)
    seed: int = _setting(42, "Random seed of the data order, dropout and the adapter.", low=0, above=2**32)
    logging_steps: int = _setting(1, "Steps between logged losses.", low=1)
    eval_steps: int | None = _setting(None, "Steps between evaluations; the default is one per epoch.", low=1)
    save_steps: int | None = _setting(None, "Steps between checkpoints; the default is one per epoch.", low=1)
    save_total_limit: int = _setting(2, "Checkpoints to keep.", low=1)
    early_stopping: int | None = _setting(
        None, "Stop after this number of evaluations without a better loss; keep the best.", low=1
    )
    tensorboard: bool = _setting(False, "Log to OUTPUT/runs for TensorBoard.")
    report_to: tuple[str, ...] = _setting((), "Report losses and settings to wandb, mlflow or tensorboard.")

    def __post_init__(self) -> None:
        faults = [
            Diagnostic("T503", fault)
            for setting in fields(self)
            if (fault := _fault_of_value(setting.name, getattr(self, setting.name)))
        ]
        faults += [Diagnostic("T503", fault, hint=hint) for fault, hint in _contradictions(self)]
        if faults:
            raise InputRefused(*faults)

    def to_yaml(self) -> str:
        """Return the settings as a YAML file that repeats this run."""
        lists = {name: [*getattr(self, name)] for name in ("data", "column", "eval_data", "targets", "report_to")}
        values = {**asdict(self), **lists}
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


@cache
def repeating_settings() -> frozenset[str]:
    """Return the names of the settings whose flags repeat."""
    return frozenset(setting.name for setting in fields(TrainSettings) if setting.metadata["repeats"])


@cache
def types_of_settings() -> Mapping[str, Any]:
    """Return the annotation of every setting, in their order."""
    return get_type_hints(TrainSettings)


def read_settings(file: Path | None, flags: Mapping[str, object]) -> TrainSettings:
    """Return the settings of a YAML `file`, overridden by `flags` that are not None. Raise InputRefused (T501-T503)."""
    values = {} if file is None else _read(file)
    values |= {name: value for name, value in flags.items() if value is not None}
    return TrainSettings(**values)


def require_data(settings: TrainSettings) -> None:
    """Raise InputRefused (T504) for settings without training data."""
    if not settings.data:
        raise InputRefused(Diagnostic("T504", "training data is missing", hint="name it: `--data FILE`"))


def _read(file: Path) -> dict[str, Any]:
    text = read_text(file, unreadable="T501", not_utf8="T501", most_bytes=_MOST_BYTES)
    root = _parse(text, str(file))
    faults, values = _entries(root, str(file)) if root else ([], {})
    if faults:
        raise InputRefused(*faults, sources={str(file): text})
    return values


# YAML ----------------------------------------------------------------------------------------------------------------
def _parse(text: str, file: str) -> yaml.MappingNode | None:
    """Return the mapping at the root as nodes, so that no tagged value is constructed."""
    try:
        root = cast("yaml.Node | None", yaml.compose(text, Loader=yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line, column = (1, 1) if mark is None else (mark.line + 1, mark.column + 1)
        span = Span(file, line, column, line, column + 1)
        problem = getattr(error, "problem", None) or "it is nested too deeply"
        raise InputRefused(Diagnostic("T501", f"this is not YAML: {problem}", span), sources={file: text}) from error
    if root is not None and not isinstance(root, yaml.MappingNode):
        hint = "write one setting per line, for example `rank: 8`"
        message = "a file of settings is a list of keys with values"
        raise InputRefused(Diagnostic("T501", message, _span(root, file), hint=hint), sources={file: text})
    return root


def _entries(root: yaml.MappingNode, file: str) -> tuple[list[Diagnostic], dict[str, Any]]:
    """Return the faults of the entries, and the values of the valid ones."""
    faults, values = list[Diagnostic](), dict[str, Any]()
    names = types_of_settings().keys()
    for key, value in cast("list[tuple[yaml.Node, yaml.Node]]", root.value):
        name = str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
        if name not in names:
            hint = suggest(name, names) or f"there are {listing(names, limit=99)}"
            faults.append(Diagnostic("T502", f"there is no setting `{name}`", _span(key, file), hint=hint))
        elif name in values:
            faults.append(Diagnostic("T502", f"`{name}` is set a second time", _span(key, file)))
        else:
            values[name], fault = _value(name, value)
            if fault := fault or _fault_of_value(name, values[name]):
                faults.append(Diagnostic("T503", fault, _span(value, file)))
    return faults, values


def _value(name: str, node: yaml.Node) -> tuple[Any, str]:
    """Return the plain value of a node by the setting's type, and its fault."""
    wanted = types_of_settings()[name]
    if isinstance(node, yaml.SequenceNode) and get_origin(wanted) is tuple:
        items = cast("list[yaml.Node]", node.value)
        if all(isinstance(item, yaml.ScalarNode) for item in items):
            return tuple(str(item.value) for item in items), ""
    if not isinstance(node, yaml.ScalarNode):
        return None, f"`{name}` must be {_words(wanted)}"
    if name in repeating_settings() and node.tag in _PLAIN_TAGS:
        return ((str(node.value),) if node.tag != "tag:yaml.org,2002:null" else ()), ""
    if str in _options(wanted) and node.tag in _PLAIN_TAGS and node.tag != "tag:yaml.org,2002:null":
        return node.value, ""
    if node.tag not in _PLAIN_TAGS:
        return None, f"`{name}` must be {_words(wanted)}, found the tag `{node.tag}`"
    try:
        return _converted(name, cast("Any", yaml.SafeLoader("")).construct_object(node))
    except (ValueError, OverflowError):  # a number with thousands of digits, or one that no float holds
        return None, f"`{name}` must be {_words(wanted)}, found `{node.value!s:.40}`"


_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null"))


def _converted(name: str, value: object) -> tuple[Any, str]:
    options = _options(types_of_settings()[name])
    if isinstance(value, bool) and bool not in options and {"on", "off"} & set(options):
        return ("on" if value else "off"), ""  # YAML reads these two words as truth values
    if isinstance(value, str) and float in options:  # `1e-4` is text to YAML 1.1
        try:
            return float(value), ""
        except ValueError:
            return value, ""
    if isinstance(value, int) and not isinstance(value, bool) and float in options:
        return float(value), ""
    return value, ""


def _span(node: yaml.Node, file: str) -> Span:
    start, end = node.start_mark, node.end_mark
    return Span(file, start.line + 1, start.column + 1, end.line + 1, end.column + 1)


# Values --------------------------------------------------------------------------------------------------------------
def _options(wanted: Any) -> tuple[Any, ...]:
    """Return the types and words that an annotation allows."""
    if get_origin(wanted) in (Union, types.UnionType):
        return tuple(option for option_type in get_args(wanted) for option in _options(option_type))
    if get_origin(wanted) is Literal:
        return get_args(wanted)
    return (get_origin(wanted) or wanted,)


def _words(wanted: Any) -> str:
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false", tuple: "a list of names"}
    return " or ".join(names.get(option, f"`{option}`") for option in _options(wanted) if option is not type(None))


def _fault_of_value(name: str, value: object) -> str:
    """Return the fault of a value by itself, or an empty text."""
    wanted = types_of_settings()[name]
    options = _options(wanted)
    if value is None and type(None) in options:
        return ""
    of_type = any(value == option if isinstance(option, str) else type(value) is option for option in options)
    if not of_type and not (float in options and type(value) is int):
        return f"`{name}` must be {_words(wanted)}, found `{value!s:.100}`"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return ""
    limits = next(setting.metadata for setting in fields(TrainSettings) if setting.name == name)
    low, above = limits["low"], limits["above"]
    if not math.isfinite(value):
        return f"`{name}` must be a number, found `{value}`"
    if low is not None and value < low:
        return f"`{name}` is at least {low:g}, found {value:g}"
    if above is not None and value >= above:
        return f"`{name}` is below {above:g}, found {value:g}"
    return ""


def column_faults(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the faults of words NAME=COLUMN, with a hint."""
    names, columns = set[str](), set[str]()
    for word in words:
        name, equals, column = word.partition("=")
        if not (name and equals and column):
            yield f"`column` is NAME=COLUMN, found `{word:.100}`", "for example `prompt=question`"
        elif name in names or column in columns:
            yield f"`column` gives `{name if name in names else column:.100}` twice", "leave one of the two out"
        names.add(name)
        columns.add(column)


def _contradictions(settings: TrainSettings) -> Iterator[tuple[str, str]]:
    """Yield settings that are valid alone and contradict each other, with a hint."""
    yield from column_faults(settings.column)
    if settings.epochs == 0 and settings.max_steps is None:
        yield (
            "a run of 0 `epochs` has no steps",
            "give `epochs` a larger number, or `max_steps`; `--dry-run` reads the data",
        )
    if settings.learning_rate == 0:
        yield "with a `learning_rate` of 0 nothing is learned", "give it a larger number; `--dry-run` reads the data"
    for name in ("early_stopping", "eval_steps"):
        if getattr(settings, name) and not (settings.eval_data or settings.eval_split):
            yield f"`{name}` needs held-out data", "give `eval_data` or `eval_split`"
    if settings.method == "sft" and settings.beta is not None:
        yield "`beta` is for preferences", "leave it out, or add `method: dpo` or `method: kto`"
    if settings.method != "sft":
        for name in ("packing", "train_on_prompt", "streaming"):
            if getattr(settings, name):
                yield f"`{name}` is for `method: sft`", f"leave it out with `{settings.method}`"
        if settings.format != "auto":
            yield f"`format` is for `method: sft`, and `{settings.method}` has formats of its own", "leave it out"
        if settings.method == "kto" and settings.batch < 2:
            yield "`method: kto` compares the answers of a batch, and `batch` is 1", "give it 2 or more"
    for name in settings.report_to:
        if name not in REPORTERS:
            hint = suggest(name, REPORTERS) or f"there are {listing(REPORTERS)}"
            yield f"`report_to` has no `{name}`", hint
    if settings.eval_data and settings.eval_split:
        yield "`eval_data` and `eval_split` are two ways to hold data out", "give one of them"
    if settings.processes and settings.accumulation % settings.processes:
        yield (
            f"{settings.processes} `processes` cannot share {settings.accumulation} micro-batches evenly",
            "give `accumulation` a multiple",
        )
    if settings.stack == "on" and settings.accumulation == 1:
        yield "`stack: on` stacks the micro-batches of a step, and `accumulation` is 1", "give it 2 or more"
    if settings.stack == "on" and settings.router_aux_loss:
        hint = "the load-balancing loss is that of one micro-batch; leave one of them out"
        yield "`stack: on` and `router_aux_loss` exclude each other", hint
