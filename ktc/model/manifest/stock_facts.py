"""The facts about a stock model on which its rewrites rest: config values, settings of modules, code.

In: a stock model and the recipe. Out: `Assumptions`, at compilation for `ktc.json` and at each load to compare with it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ktc.model.graph.typed import named_modules
from ktc.model.manifest.assumptions import AssumedModule, AssumedSites, Assumptions
from ktc.model.manifest.code_facts import digest, names_read
from ktc.model.manifest.manifest import Rewrite
from ktc.model.targets import MODULES

# Attributes of every module, of transformers' bookkeeping, and the layer's own number.
NOT_SETTINGS = frozenset({*vars(nn.Module()), "_is_hf_initialized", "_is_expert_parallel", "layer_idx"})
_REPLACING = ("graph_block", *(name for name, target in MODULES.items() if target.replaces_code))


@dataclass(frozen=True, slots=True)
class Region:
    """A stock module at `fqn` that a step of the recipe replaces, with everything below it."""

    fqn: str
    module: nn.Module

    @property
    def classes(self) -> frozenset[type[nn.Module]]:
        """The classes of its modules."""
        return frozenset(type(module) for module in self.module.modules())

    @property
    def configs(self) -> dict[str, tuple[PreTrainedConfig, frozenset[str]]]:
        """The configs that its modules hold, by path, and the keys that its code reads in a call."""
        holders = defaultdict[int, set[str]](set)
        configs = dict[int, tuple[str, PreTrainedConfig]]()
        for name, module in named_modules(self.module):
            for attribute, value in vars(module).items():
                if isinstance(value, PreTrainedConfig):
                    holders[id(value)].add(attribute)
                    path = ".".join(filter(None, (self.fqn, name, attribute)))
                    configs.setdefault(id(value), (path, value))
        return {
            path: (config, names_read(self.classes, config, frozenset(holders[number])))
            for number, (path, config) in configs.items()
        }


def regions(model: nn.Module, recipe: Sequence[Rewrite]) -> tuple[Region, ...]:
    """Return the outermost modules of a stock model that the recipe replaces; `realise` refuses missing ones."""
    modules = dict(named_modules(model))
    blocks = tuple(f"{step.fqn}." for step in recipe if step.module == "graph_block")
    replaced = (step.fqn for step in recipe if step.module in _REPLACING and not step.fqn.startswith(blocks))
    return tuple(Region(fqn, modules[fqn]) for fqn in replaced if fqn in modules)


def assumptions_of(model: PreTrainedModel, recipe: Sequence[Rewrite]) -> Assumptions:
    """Return the facts about a stock model, as it was built, on which the recipe rests."""
    replaced = regions(model, recipe)
    sites = defaultdict[tuple[Any, ...], list[str]](list)
    for region in replaced:
        rows = _modules(region.module)
        sites[tuple((row.name, row.class_name, tuple(row.attributes.items())) for row in rows)].append(region.fqn)
    classes = {module_class for region in replaced for module_class in region.classes}
    code = {
        class_name(module_class): digest(module_class)
        for module_class in classes
        if not module_class.__module__.startswith("torch.")
    }
    return Assumptions(
        _config_values(model, replaced),
        tuple(
            AssumedSites(tuple(fqns), tuple(AssumedModule(name, kind, dict(values)) for name, kind, values in rows))
            for rows, fqns in sites.items()
        ),
        dict(sorted(code.items())),
    )


def _config_values(model: PreTrainedModel, replaced: Sequence[Region]) -> dict[str, str]:
    spellings = dict[str, str]()
    for region in replaced:
        for path, (config, names) in region.configs.items():
            at = config_path(model, config) or path
            values = {f"{at}.{name}": spelled(vars(config)[name]) for name in sorted(names)}
            spellings |= {name: value for name, value in values.items() if value is not None}
    return spellings


def config_path(model: PreTrainedModel, config: PreTrainedConfig) -> str:
    """Return `config`, or `config.text_config` and the like: where the model has this config; "" if nowhere."""
    if config is model.config:
        return "config"
    parts = vars(model.config).items()
    return next((f"config.{name}" for name, part in parts if part is config), "")


def class_name(module_class: type[nn.Module]) -> str:
    """Return the class with its file: `modeling_x.XExperts`. Folders of code differ from machine to machine."""
    return f"{module_class.__module__.rpartition('.')[2]}.{module_class.__qualname__}"


def settings(module: nn.Module) -> dict[str, object]:
    """Return the plain attributes of a module, which its code may read."""
    return {n: v for n, v in vars(module).items() if n not in NOT_SETTINGS and spelled(v) is not None}


def spelled(value: object) -> str | None:
    """Return the spelling of a plain value or function, equal for equal ones; None for modules, tensors and dtypes.

    A config is none either: only its values that code reads are facts.
    """
    if isinstance(value, PreTrainedConfig):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, FunctionType | BuiltinFunctionType | type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, functools.partial):
        value = cast("functools.partial[object]", value)
        return _joined("partial", [value.func, *value.args, *value.keywords.items()])
    if isinstance(value, list | tuple):
        return _joined("list" if isinstance(value, list) else "tuple", cast("Sequence[object]", value))
    if isinstance(value, set | frozenset):
        return _joined("set", sorted(cast("set[object]", value), key=repr))
    if isinstance(value, dict):
        return _joined("dict", list(cast("dict[object, object]", value).items()))
    if isinstance(value, SimpleNamespace) or dataclasses.is_dataclass(value):
        fields = getattr(value, "__dict__", None) or {f: getattr(value, f) for f in getattr(value, "__slots__", ())}
        return _joined(type(value).__name__, list(fields.items()))
    return None


def _joined(kind: str, items: Sequence[object]) -> str | None:
    inner = [spelled(item) for item in items]
    return None if None in inner else f"{kind}({', '.join(cast('list[str]', inner))})"


def _modules(root: nn.Module) -> tuple[AssumedModule, ...]:
    """Return the modules below `root`; those of a list count once if they are equal."""
    rows = defaultdict[str, list[AssumedModule]](list)
    for name, module in named_modules(root):
        values = {key: cast("str", spelled(value)) for key, value in sorted(settings(module).items())}
        rows[re.sub(r"(?<![^.])\d+(?![^.])", "*", name)].append(AssumedModule(name, class_name(type(module)), values))
    assumed = list[AssumedModule]()
    for pattern, equal in rows.items():
        first = equal[0]
        if all((row.class_name, row.attributes) == (first.class_name, first.attributes) for row in equal):
            assumed.append(dataclasses.replace(first, name=pattern))
        else:
            assumed += equal
    return tuple(assumed)
