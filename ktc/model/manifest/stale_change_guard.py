"""Changes of a loaded model that its compiled code would ignore: logged once, at the next forward.

In: the stock model before the recipe is realised (`remember`) and the compiled one after (`guard`).
Out: a `StaleChangeGuard` in each module of experts, and before each stock module that runs other code. It compares
snapshots with the objects that users change: settings of replaced modules, their code, config values that the code
reads, and modules that nothing calls.
Tensors are not compared, and nothing is compared under `torch.compile`.
"""

from __future__ import annotations

import copy
import functools
import logging
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ktc.diagnostics import Diagnostic, listing, render
from ktc.foundation.regular_files import read_regular
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.private_api import HOOKS
from ktc.model.graph.typed import named_modules
from ktc.model.manifest.code_facts import functions_of
from ktc.model.manifest.manifest import Rewrite
from ktc.model.manifest.stock_facts import Region, class_name, config_path, regions, settings, spelled

log = logging.getLogger(__name__)

_TENSORS = ("_modules", "_parameters")  # of a module, in its `__dict__`
_SETTING = "`{what}.{name}` is now {now}, and the compiled code has {before}"
_UNCALLED = "`{what}.{name}` was replaced, and the compiled code does not call it"
_HOOKED = "`{what}` has hooks, and the compiled code does not call it"
_GIVEN = "`{what}` received {now}, and the compiled code does not read it"
_HINT = "undo the change, or compile again with it"


@dataclass(slots=True)
class Snapshot:
    """Some attributes of an object (`where` is `__dict__`) or children of a module, with their values at one time."""

    owner: Any
    what: str
    names: tuple[str, ...]
    sentence: str = _SETTING
    where: Literal["__dict__", "_modules"] = "__dict__"
    values: tuple[object, ...] = ()
    read: Callable[[Any], object] = operator.itemgetter("")  # of `names`

    def __post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Take the present values."""
        attributes = getattr(self.owner, self.where)
        names = self.names if len(self.names) > 1 else self.names * 2  # of one name, `itemgetter` makes no tuple
        there = bool(names) and all(name in attributes for name in names)
        self.read = operator.itemgetter(*names) if there else functools.partial(_values_of, names)
        self.values = tuple(map(_copied, cast("tuple[object, ...]", self.read(attributes))))

    def is_current(self) -> bool:
        """Return whether all values are as they were. Each forward of a layer calls this."""
        try:
            return self.read(getattr(self.owner, self.where)) == self.values
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone, or a tensor has no single answer
            return False

    def changes(self) -> Iterator[tuple[str, str]]:
        """Yield each change: a name, and the sentence about it."""
        present = _values_of(self.names, getattr(self.owner, self.where))
        for name, before, now in zip(self.names, self.values, present, strict=False):
            if isinstance(now, torch.Tensor) or now != before:
                facts = {"now": _described(before, now), "before": spelled(before)}
                yield name, self.sentence.format(what=self.what, name=name, **facts)


def _values_of(names: tuple[str, ...], present: Mapping[str, object]) -> tuple[object, ...]:
    return tuple(map(present.get, names))


def _described(before: object, now: object) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        added = cast("dict[str, object]", now).keys() - cast("dict[str, object]", before).keys()
        return listing(sorted(added)) if added else "other contents"
    return spelled(now) or f"a `{type(now).__name__}`"


def _copied(value: Any) -> object:
    """Copy a container, which can change in place."""
    if spelled(value) is None:
        return dict(cast("dict[str, object]", value)) if isinstance(value, dict) else value
    copied = copy.deepcopy(value)
    return copied if copied == value else value


@dataclass(frozen=True, slots=True)
class StaleChangeGuard:
    """The snapshots that one module compares before it computes. The guards of a model share `logged`.

    A module that is copied alone, as PEFT copies one that trains, keeps the guard: it refers to other modules.
    """

    snapshots: tuple[Snapshot, ...]
    logged: set[tuple[str, str]]
    stays: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> StaleChangeGuard:
        return self if self.stays else StaleChangeGuard(*copy.deepcopy((self.snapshots, self.logged), memo))

    def __reduce__(self) -> Any:
        """Become None in a pickle: a model that is read from one has no guard."""
        return type(None), ()

    def __call__(self, *_: object) -> None:
        """Log every change (L428) that was not logged before. Layers with the same change have one line."""
        if torch.compiler.is_compiling():
            return
        for snapshot in self.snapshots:
            if not snapshot.is_current():
                self._log(snapshot)
                snapshot.renew()

    def _log(self, snapshot: Snapshot) -> None:
        for name, sentence in snapshot.changes():
            key = re.sub(r"\.\d+(?=\.|$)", ".*", snapshot.what), name
            if key not in self.logged:
                self.logged.add(key)
                log.warning("%s", render([Diagnostic("L428", sentence, hint=_HINT, severity="warning")]))


@dataclass(frozen=True, slots=True)
class Remembered:
    """A region before its rewrite: the settings of its root, and snapshots of its classes and configs."""

    fqn: str
    settings: Mapping[str, object]
    shared: tuple[Snapshot, ...]


def remember(model: PreTrainedModel, recipe: Sequence[Rewrite]) -> tuple[Remembered, ...]:
    """Return the regions of the stock `model` that the rewrites replace, as they are now."""
    replaced = regions(model, recipe)
    return tuple(Remembered(region.fqn, settings(region.module), tuple(_shared(model, region))) for region in replaced)


def _shared(model: PreTrainedModel, region: Region) -> Iterator[Snapshot]:
    for path, (config, names) in region.configs.items():
        if names:
            yield Snapshot(config, config_path(model, config) or path, tuple(sorted(names)))
    functions = dict[type, list[str]]()
    for module_class in sorted(region.classes, key=class_name):
        for owner, name, _ in functions_of(module_class):
            functions.setdefault(owner, []).append(name)
    for owner, names in functions.items():
        yield Snapshot(owner, class_name(owner), tuple(dict.fromkeys(names)), _UNCALLED)


def guard(model: nn.Module, recipe: Sequence[Rewrite], remembered: Sequence[Remembered], folder: Path) -> None:
    """Put a guard into every module that a rewrite made. The settings of replaced experts stay readable."""
    files = {step.fqn: str(step.args["file"]) for step in recipe if step.module == "graph_block"}
    shared = {(id(snapshot.owner), snapshot.names): snapshot for region in remembered for snapshot in region.shared}
    logged = set[tuple[str, str]]()
    for number, region in enumerate(remembered):
        module = model.get_submodule(region.fqn)
        # The first and the last region check the shared snapshots, in case a user replaces one of the two.
        common = tuple(shared.values()) if number in (0, len(remembered) - 1) else ()
        if region.fqn in files:
            called = called_modules(read_regular(folder / files[region.fqn]).decode())
            snapshots = (*common, *_of_block(module, region.fqn, called))
            module.register_forward_pre_hook(StaleChangeGuard(snapshots, logged))
        elif isinstance(module, FusedMoe):
            vars(module).update({n: value for n, value in region.settings.items() if not hasattr(module, n)})
            names = tuple(name for name in region.settings if name in vars(module))
            if names:
                common = (*common, Snapshot(module, region.fqn, names))
            trains = module.weights.training.trains
            tensors = _TENSORS[:1] if trains else _TENSORS  # a load or a functional call gives it other parameters
            snapshots = (*common, Snapshot(module, region.fqn, tensors, _GIVEN))
            module.guard = StaleChangeGuard(snapshots, logged, trains)
        else:  # a stock module with other code
            settings_of = [Snapshot(module, region.fqn, tuple(region.settings))] if region.settings else []
            module.register_forward_pre_hook(StaleChangeGuard((*common, *settings_of), logged))


def _of_block(block: nn.Module, fqn: str, called: frozenset[str]) -> Iterator[Snapshot]:
    """Yield snapshots of a block and of the modules in it that its code does not call."""
    skipped = tuple(f"{name}." for name in called)
    for name, module in named_modules(block):
        if name in called or name.startswith(skipped):
            continue
        what = f"{fqn}.{name}".rstrip(".")
        configs = (attribute for attribute, value in vars(module).items() if isinstance(value, PreTrainedConfig))
        if names := (*settings(module), *configs):
            yield Snapshot(module, what, names)
        children = (child for child, _ in module.named_children())
        if uncalled := tuple(child for child in children if f"{name}.{child}".lstrip(".") not in called):
            yield Snapshot(module, what, uncalled, _UNCALLED, "_modules")
        if name:
            yield Snapshot(module, what, ("forward",), _UNCALLED)
            yield Snapshot(module, what, HOOKS, _HOOKED)


def called_modules(text: str) -> frozenset[str]:
    """Return the modules, by their path in the block, that the code of a block's file calls."""
    before = ""
    while before != text:  # a graph prints the name of a list's member as `getattr(self.layers, "0")`
        before, text = text, re.sub(r'getattr\((self[\w.]*), "(\w+)"\)', r"\1.\2", text)
    return frozenset(re.findall(r"\bself\.([\w.]+)\(", text))
