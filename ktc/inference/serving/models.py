"""The names that clients may request: a model, and adapters on it that are loaded side by side.

In: the folder OUT, a plain adapter or none, and adapters by name. Out: frozen `ServedModels`. All adapters are checked
before the first is attached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.inference.generate.language_model import LanguageModel, open_language_model, read_adapter_tokenizer
from ktc.model.hf.processor import with_tokenizer
from ktc.model.loading.images import open_processor

PLAIN = "default"  # PEFT's name of the adapter that answers under the model's own name


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One name: the model with its tokenizer, and PEFT's name of its adapter, "" without one."""

    opened: LanguageModel
    adapter: str = ""


class ServedModels:
    """All names; the first answers requests that name no model. A change replaces the mapping as a whole."""

    def __init__(self, names: Mapping[str, ServedModel], notes: Sequence[Diagnostic] = ()) -> None:
        self.names, self.notes = names, tuple(notes)

    @property
    def default(self) -> ServedModel:
        return next(iter(self.names.values()))

    def name_of(self, adapter: str) -> str:
        """Return the name that answers with an adapter."""
        return next(name for name, served in self.names.items() if served.adapter == adapter)

    def put(self, name: str, served: ServedModel) -> None:
        """Register a model name, known or new, for another adapter."""
        self.names = {**self.names, name: served}

    def drop(self, name: str) -> None:
        """Unregister a model name."""
        self.names = {known: served for known, served in self.names.items() if known != name}


class LoadedAdapters:
    """The adapters of a model, one active at a time, "" for none. All calls are on one thread."""

    _model: Any

    def __init__(self, model: Any) -> None:
        self._model = model
        self._active: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """PEFT's names of the adapters."""
        return tuple(getattr(self._model, "peft_config", ()) if self._is_tuned else ())

    @property
    def _is_tuned(self) -> bool:
        return hasattr(self._model, "get_base_model")

    @property
    def base(self) -> Any:
        """The model without adapters, or under them."""
        return self._model.get_base_model() if self._is_tuned else self._model

    def use(self, name: str) -> None:
        """Make an adapter active, or none for ""."""
        if name == self._active:
            return
        self._active = None  # until all layers have changed
        if self._is_tuned:
            tuner = self._model.base_model
            if name:
                tuner.enable_adapter_layers()
                self._model.set_adapter(name)
            else:
                tuner.disable_adapter_layers()
        self._active = name

    def load(self, name: str, folder: Path) -> None:
        """Load an adapter beside the others, in evaluation mode. Raises as `attach`; the model is then as before."""
        from ktc.adapters.adapter import attach, attach_beside

        self._active = None
        base = self.base
        try:
            if self._is_tuned:
                attach_beside(self._model, folder, name)
            else:
                self._model = cast("Any", attach(base, folder, alone=False, adapter_name=name))
        except BaseException:
            self._discard(name)
            raise
        self._model.eval()

    def remove(self, name: str) -> None:
        """Remove an adapter, and PEFT's layers with the last of them."""
        self._active = None
        self._discard(name)

    def _discard(self, name: str) -> None:
        from ktc.adapters.adapter import detach

        if [known for known in self.names if known != name]:
            if name in self.names:
                self._model.delete_adapter(name)
        else:
            self._model = cast("Any", detach(self.base))


def named_adapters(given: Sequence[str]) -> tuple[Path | None, dict[str, Path]]:
    """Return the plain adapter and those by name of `A` and `NAME=FOLDER`. Raises InputRefused (G723)."""
    plain, named = list[Path](), dict[str, Path]()
    for option in given:
        name, equals, folder = option.partition("=")
        if not equals or Path(option).is_dir():
            plain.append(Path(option))
        elif not name or not folder or name in named:
            message = f"`--adapter {option}` has no name, no folder, or a name that is taken"
            raise InputRefused(Diagnostic("G723", message, hint="write `--adapter NAME=FOLDER`"))
        else:
            named[name] = Path(folder)
    if len(plain) > 1:
        message = f"{len(plain)} adapters have no name, and one of them can answer under the model's"
        raise InputRefused(Diagnostic("G723", message, hint="write `--adapter NAME=FOLDER`"))
    return (plain[0] if plain else None), named


def open_served_models(
    out: Path, given: Sequence[str] = (), *,
    reference: bool = False, weights: Path | None = None, trust_remote_code: bool = False, updates: bool = False,
    name: str = "",
) -> ServedModels:  # fmt: skip
    """Load the model in `out` as `name` and adapters, `A` or `NAME=FOLDER`. Raises as `open_language_model`, and G723.

    The plain adapter alone may change weights of the model, unless `updates` may load others beside it.
    """
    from ktc.adapters.adapter import attach_several

    plain, named = named_adapters(given)
    name = name or out.resolve().name
    if name in named:
        message = f"an adapter has the name of the model, `{name}`"
        raise InputRefused(Diagnostic("G723", message, hint="give it another name"))
    keys = {known: f"served_{at}" for at, known in enumerate(named)}
    folders = {PLAIN: plain} if plain is not None else {}
    folders |= {keys[known]: folder for known, folder in named.items()}
    processor, notes = _processor(out, trust_remote_code)
    opened = open_language_model(
        out, reference=reference, weights=weights, trust_remote_code=trust_remote_code, name=name
    )
    opened = replace(opened, processor=processor)
    model: Any = opened.model
    if folders:
        model = attach_several(model, folders, alone=plain is not None and not updates).eval()
    served = {opened.name: ServedModel(with_adapter(opened, model, plain), PLAIN if plain is not None else "")}
    served |= {known: ServedModel(with_adapter(opened, model, folder), keys[known]) for known, folder in named.items()}
    return ServedModels(served, notes)


def _processor(out: Path, trusted: bool) -> tuple[Any, tuple[Diagnostic, ...]]:
    """Return the processor of a model that reads images; None for another, and a warning where it cannot be read."""
    try:
        return open_processor(out, trusted=trusted), ()
    except InputRefused as refusal:
        fault = refusal.diagnostics[0]
        if fault.code == "G731":
            return None, ()
        message = f"requests with images are refused: {fault.message}"
        return None, (Diagnostic("G732", message, hint=fault.hint, severity="warning"),)


def with_adapter(opened: LanguageModel, model: Any, adapter: Path | None) -> LanguageModel:
    """Return the model with an adapter's tokenizer, where its folder has one. Raises InputRefused (G701)."""
    if adapter is None:
        return replace(opened, model=model)
    tokenizer = read_adapter_tokenizer(adapter, opened)
    its_own = tokenizer is not opened.tokenizer
    processor = with_tokenizer(opened.processor, tokenizer) if its_own else opened.processor
    return replace(opened, model=model, tokenizer=tokenizer, adapter=str(adapter), processor=processor)
