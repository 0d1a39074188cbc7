"""A LLaMA-Factory YAML file for `ktc lf`.

In: the file and KEY=VALUE words. Out: a frozen `Request`. LLaMA-Factory is not imported. Refused, all faults together:
an invalid file (F903, F904), words that are not settings (F905), KTransformers' switch (F906), and stages without a
KTrainer (F907). Also a model that ktc did not compile (F908), LoRA targets that match nothing (F909) or contradict the
rules (F910), settings that a compiled model cannot have (F911), untrusted code (F912).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import yaml

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused, listing, suggest
from ktc.foundation import versions
from ktc.foundation.regular_files import read_regular
from ktc.model.checkpoint import read_sources

TESTED: Final = (0, 9, 5)  # of LLaMA-Factory: constraints-lf.txt
STAGES: Final = ("sft", "pt", "dpo")  # those whose trainer becomes a KTrainer
RULES: Final = "rules"  # a value of `lora_target`: the rules of the compiled model decide
_OF_LORA: Final = (
    "lora_rank", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "pissa_init", "additional_target",
)  # fmt: skip
_IMPOSSIBLE: Final[Mapping[str, str]] = {
    "deepspeed": "its parts would be distributed again over processes",
    "fsdp": "its parts would be distributed again over processes",
    "quantization_bit": "its weights have the format that the rules gave them",
    "use_unsloth": "unsloth loads models itself",
    "use_dora": "DoRA reads weights that are packed",
    "mixture_of_depths": "its layers are those that were compiled",
    "use_llama_pro": "its layers are those that were compiled",
    "resize_vocab": "its embeddings are those of the checkpoint",
    "use_ray": "run it under torchrun instead",
}


@dataclass(frozen=True, slots=True)
class Request:
    """The command line for LLaMA-Factory (`x.yaml`, `key=value` ...), and the settings that ktc needs.

    `by_rules`: the adapter is that of the model's rules. `adapters` are the folders that training starts from.
    """

    words: tuple[str, ...]
    stage: str
    model: Path
    output: Path
    do_train: bool
    by_rules: bool
    adapters: tuple[str, ...]


def check_installed() -> tuple[Diagnostic, ...]:
    """Return a warning (F902) for an untested release. Raise `HostLacks` (F901) if LLaMA-Factory is missing."""
    version = versions.installed("llamafactory")
    tested = versions.dotted(TESTED)
    if version is None:
        hint = (
            "`make lf-environment`, or `pip install -c constraints-lf.txt llamafactory` into an environment of its own"
        )
        raise HostLacks(Diagnostic("F901", f"LLaMA-Factory {tested} is not installed beside this ktc", hint=hint))
    if versions.release(version) == TESTED:
        return ()
    message = f"ktc was tested with LLaMA-Factory {tested}, and {version} is installed"
    hint = f"if something fails: `pip install -c constraints-lf.txt llamafactory=={tested}`"
    return (Diagnostic("F902", message, hint=hint, severity="warning"),)


def read_request(file: Path, words: Sequence[str]) -> Request:
    """Return the settings in `file`, overridden by `words`. Raise `InputRefused` with all faults."""
    settings = {**_read(file), **_overrides(words)}
    problems = [*_setting_faults(settings), *_model_faults(settings)]
    if problems:
        raise InputRefused(*problems)
    return Request(
        words=(str(file), *words),
        stage=_stage(settings),
        model=Path(str(settings["model_name_or_path"])),
        output=Path(str(settings.get("output_dir", "."))),
        do_train=bool(settings.get("do_train", False)),
        by_rules=_targets(settings) == (RULES,),
        adapters=_listed(settings.get("adapter_name_or_path")),
    )


def _read(file: Path) -> dict[str, Any]:
    if file.suffix not in (".yaml", ".yml"):
        message = f"`{file}` is not a file name that LLaMA-Factory reads as YAML"
        raise InputRefused(Diagnostic("F903", message, hint="name it `.yaml`"))
    try:
        content: object = yaml.safe_load(read_regular(file).decode())
    except (OSError, UnicodeDecodeError) as error:
        words = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputRefused(Diagnostic("F903", f"`{file}` cannot be read: {words}")) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date such as 2026-13-01 is a ValueError
        raise InputRefused(Diagnostic("F904", f"`{file}` is not YAML: {_one_line(error)}")) from error
    if not isinstance(content, dict):
        message = f"`{file}` holds {type(content).__name__}, where LLaMA-Factory reads `key: value`"
        raise InputRefused(Diagnostic("F904", message))
    return cast("dict[str, Any]", content)


def _overrides(words: Sequence[str]) -> dict[str, Any]:
    """Parse `["lora_rank=4"]` as `{"lora_rank": 4}`; the values are YAML, as in LLaMA-Factory."""
    settings, faults = dict[str, Any](), list[Diagnostic]()
    for word in words:
        name, equals, value = word.partition("=")
        try:
            settings[name] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            faults.append(Diagnostic("F905", f"the value of `{name}` is not YAML: {_one_line(error)}"))
        if not (name.isidentifier() and equals):
            faults.append(Diagnostic("F905", f"settings are words like `max_steps=10`, found `{word}`"))
    if faults:
        raise InputRefused(*faults)
    return settings


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _stage(settings: Mapping[str, Any]) -> str:
    return str(settings.get("stage", "sft"))


def _targets(settings: Mapping[str, Any]) -> tuple[str, ...]:
    return _listed(settings.get("lora_target", "all"))


def _listed(value: object) -> tuple[str, ...]:
    """Split one of LLaMA-Factory's lists, words separated by commas."""
    items = cast("list[object]", value) if isinstance(value, list) else [] if value is None else str(value).split(",")
    return tuple(str(item).strip() for item in items)


def _setting_faults(settings: Mapping[str, Any]) -> Iterator[Diagnostic]:
    if settings.get("use_kt"):
        hint = "remove `use_kt`: a compiled model needs no switch"
        yield Diagnostic("F906", "`use_kt: true` requires KTransformers' own transformers and accelerate", hint=hint)
    if (stage := _stage(settings)) not in STAGES:
        hint = suggest(stage, STAGES) or f"supported: {listing(STAGES)}"
        yield Diagnostic("F907", f"`ktc lf` has no KTrainer for the stage `{stage}`", hint=hint)
    if not settings.get("trust_remote_code"):
        hint = "`trust_remote_code: true`, if you trust that folder"
        yield Diagnostic("F912", "a compiled model contains code, and `trust_remote_code` does not allow it", hint=hint)
    kind = settings.get("finetuning_type", "lora")
    if kind != "lora":
        hint = "`finetuning_type: lora`"
        yield Diagnostic("F911", f"a compiled model is tuned by LoRA, not by `finetuning_type: {kind}`", hint=hint)
    for name in sorted(_IMPOSSIBLE.keys() & settings.keys()):
        if settings[name]:
            message = f"a compiled model cannot have `{name}`: {_IMPOSSIBLE[name]}"
            yield Diagnostic("F911", message, hint=f"remove `{name}`")
    if _targets(settings) == (RULES,):
        for name in _OF_LORA:
            if name in settings:
                message = f"`lora_target: {RULES}` takes the adapter of the model's rules, and `{name}` contradicts it"
                hint = f"remove `{name}`, or compile the model with other rules or `--set`"
                yield Diagnostic("F910", message, hint=hint)


def _model_faults(settings: Mapping[str, Any]) -> Iterator[Diagnostic]:
    named = settings.get("model_name_or_path")
    folder = Path(str(named))
    if named is None or not (folder / "ktc.json").is_file():
        message = "`model_name_or_path` is missing" if named is None else f"`{named}` is not a compiled model"
        hint = "name the folder that `ktc compile MODEL RULES -o OUT` wrote"
        yield Diagnostic("F908", message, hint=hint)
        return
    targets = _targets(settings)
    if targets not in ((RULES,), ("all",)):
        yield from _target_faults(targets, _linear_names(folder), folder)


def _linear_names(folder: Path) -> frozenset[str]:
    """Return the modules of the compiled model that have a weight matrix. Raise `InputRefused` (F908)."""
    try:
        rows = read_sources(read_regular(folder / "weights.json"))
    except (OSError, ValueError) as error:
        message = f"`{folder / 'weights.json'}` is damaged: {_one_line(error)}"
        raise InputRefused(Diagnostic("F908", message, hint="compile the model again")) from error
    matrices = (row.target for row in rows if row.expert is None and len(row.shape) == 2)
    return frozenset(name.removesuffix(".weight") for name in matrices if name.endswith(".weight"))


def _target_faults(targets: Sequence[str], modules: frozenset[str], folder: Path) -> Iterator[Diagnostic]:
    """Yield the targets that match no module: PEFT ignores one of several."""
    for target in targets:
        if any(name == target or name.endswith(f".{target}") for name in modules):
            continue
        near = suggest(target, {name.rpartition(".")[2] for name in modules})
        hint = near or f"`lora_target: {RULES}` takes the layers that the rules chose, including routed experts"
        message = f"the LoRA target `{target}` matches no linear module of `{folder.name}`"
        yield Diagnostic("F909", message, hint=hint)
