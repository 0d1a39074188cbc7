"""The names that clients may request: a model, and adapters on it that are loaded side by side.

In: the folder OUT, a plain adapter or none, and adapters by name. Out: frozen `ServedModels`. All adapters are checked
before the first is attached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.generate.language_model import LanguageModel, open_language_model, read_adapter_tokenizer

PLAIN = "default"  # PEFT's name of the adapter that answers under the model's own name


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One name: the model with its tokenizer, and PEFT's name of its adapter, "" without one."""

    opened: LanguageModel
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class ServedModels:
    """All names; the first answers requests that name no model."""

    names: Mapping[str, ServedModel]

    @property
    def default(self) -> ServedModel:
        return next(iter(self.names.values()))

    def name_of(self, adapter: str) -> str:
        """Return the name that answers with an adapter."""
        return next(name for name, served in self.names.items() if served.adapter == adapter)


class LoadedAdapters:
    """The adapters of a `PeftModel`, one active at a time. A model without adapters has "" alone."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._active: str | None = None

    def use(self, name: str) -> None:
        """Make an adapter active, or none for ""."""
        if name == self._active:
            return
        self._active = None  # until all layers have changed
        if hasattr(self._model, "peft_config"):
            tuner = self._model.base_model
            if name:
                tuner.enable_adapter_layers()
                self._model.set_adapter(name)
            else:
                tuner.disable_adapter_layers()
        self._active = name


def named_adapters(given: Sequence[str]) -> tuple[Path | None, dict[str, Path]]:
    """Return the plain adapter and those by name of `A` and `NAME=FOLDER`. Raises InputRefused (G723)."""
    plain, named = list[Path](), dict[str, Path]()
    for each in given:
        name, equals, folder = each.partition("=")
        if not equals or Path(each).is_dir():
            plain.append(Path(each))
        elif not name or not folder or name in named:
            message = f"`--adapter {each}` has no name, no folder, or a name that is taken"
            raise InputRefused(Diagnostic("G723", message, hint="write `--adapter NAME=FOLDER`"))
        else:
            named[name] = Path(folder)
    if len(plain) > 1:
        message = f"{len(plain)} adapters have no name, and one of them can answer under the model's"
        raise InputRefused(Diagnostic("G723", message, hint="write `--adapter NAME=FOLDER`"))
    return (plain[0] if plain else None), named


def open_served_models(
    out: Path, given: Sequence[str] = (), *,
    reference: bool = False, weights: Path | None = None, trust_remote_code: bool = False,
) -> ServedModels:  # fmt: skip
    """Load the model in `out` and adapters, `A` or `NAME=FOLDER`. Raises as `open_language_model`, and G723."""
    from ktc.adapters.adapter import attach_several

    plain, named = named_adapters(given)
    if (taken := out.resolve().name) in named:
        message = f"an adapter has the name of the model, `{taken}`"
        raise InputRefused(Diagnostic("G723", message, hint="give it another name"))
    keys = {name: f"served_{at}" for at, name in enumerate(named)}
    folders = {PLAIN: plain} if plain is not None else {}
    folders |= {keys[name]: folder for name, folder in named.items()}
    opened = open_language_model(out, reference=reference, weights=weights, trust_remote_code=trust_remote_code)
    model: Any = opened.model
    if folders:
        model = attach_several(model, folders).eval()
    found = {opened.name: ServedModel(_with(opened, model, plain), PLAIN if plain is not None else "")}
    found |= {name: ServedModel(_with(opened, model, folder), keys[name]) for name, folder in named.items()}
    return ServedModels(found)


def _with(opened: LanguageModel, model: Any, adapter: Path | None) -> LanguageModel:
    if adapter is None:
        return replace(opened, model=model)
    tokenizer = read_adapter_tokenizer(adapter, opened)
    return replace(opened, model=model, tokenizer=tokenizer, adapter=str(adapter))
