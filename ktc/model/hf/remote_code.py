"""Code in a model folder: its files, and, once the user trusts it, its classes.

Input: a model folder whose config.json has an `auto_map`. Output: names and digests of the files, without running them;
the config and model classes, which runs them. Refused: code of another repository, code without a causal LM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import (
    get_class_from_dynamic_module,  # pyright: ignore[reportUnknownVariableType]
)
from transformers.models.auto import auto_factory

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.decode import read_json
from ktc.foundation.regular_files import read_regular
from ktc.model.hf.foreign_errors import first_line, raised_by
from ktc.model.hf.patching import Patch

_MODEL = "AutoModelForCausalLM"


def code_files(folder: Path) -> dict[str, str]:
    """Return the sha256 of every Python file in `folder` and below, by its relative path.

    Linked folders are not entered. Raises `InputRefused` (I109) for a file that cannot be read.
    """
    digests: dict[str, str] = {}
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if any((folder / around).is_symlink() for around in name.parents):
            continue
        try:
            digests[name.as_posix()] = hashlib.sha256(read_regular(path)).hexdigest()
        except OSError as error:
            message = f"`{path}` is code of the model and cannot be read: {error.strerror or error}"
            raise InputRefused(Diagnostic("I109", message, hint="permit or remove it")) from error
    return digests


def model_file(folder: Path) -> str | None:
    """Return the file that `auto_map` names for causal LMs (`modeling_x.py`); None if there is none."""
    reference = _auto_map(folder).get(_MODEL)
    return None if not isinstance(reference, str) else _file(reference.split("--")[-1])


def _file(reference: str) -> str:
    return f"{reference.rpartition('.')[0]}.py"


def _auto_map(folder: Path) -> Mapping[str, Any]:
    try:
        content: object = read_json(read_regular(folder / "config.json"))
    except (OSError, ValueError):
        return {}
    auto_map = cast("dict[str, Any]", content).get("auto_map") if isinstance(content, dict) else None
    return cast("dict[str, Any]", auto_map) if isinstance(auto_map, dict) else {}


def run_code(folder: Path, config_folder: Path | None = None) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Run the code in `folder`. Return the config (read from `config_folder`, if given) and the class of the model.

    The config's class is registered for the model's class alone, so this config always builds this model. Raises
    `InputRefused` (I109) if the code cannot be used.
    """
    references = _auto_map(folder)
    foreign = next((str(r) for r in references.values() if isinstance(r, str) and "--" in r), None)
    if foreign is not None:
        message = f"config.json of `{folder.name}` names code of another repository: `{foreign}`"
        raise InputRefused(Diagnostic("I109", message, hint="copy its files into the folder, and name them there"))
    sealed = code_files(folder)
    for reference in (references.get(key) for key in (_MODEL, "AutoConfig")):
        if isinstance(reference, str) and _file(reference) not in sealed:
            message = f"config.json of `{folder.name}` names code that is not a file below it: `{reference:.100}`"
            raise InputRefused(Diagnostic("I109", message, hint="copy its files into the folder, and name them there"))
    try:
        model_class = _class(references[_MODEL], folder, PreTrainedModel)
        if "AutoConfig" in references:
            config = _class(references["AutoConfig"], folder, PreTrainedConfig).from_pretrained(config_folder or folder)
        else:
            stock = cast("PreTrainedConfig", AutoConfig.from_pretrained(config_folder or folder, local_files_only=True))
            patch: type[Patch] = type("OwnConfig", (Patch,), {})
            config = patch.put_on(stock)
        model_class.register_for_auto_class(_MODEL)  # as `AutoModelForCausalLM` does
        model_class = cast("Any", auto_factory).add_generation_mixin_to_remote_model(model_class)
        model_class.config_class = type(config)
        AutoModelForCausalLM.register(type(config), model_class, exist_ok=True)
    except Exception as error:  # foreign code raises anything
        message = f"the code of `{folder.name}` cannot be used: {type(error).__name__}: {first_line(error)}"
        raise InputRefused(Diagnostic("I109", message, hint=raised_by(error))) from error
    return config, model_class


def config_class_of(model_class: type[PreTrainedModel]) -> type[PreTrainedConfig] | None:
    """Return the config class of a model with code of its own; None for a model of transformers."""
    return cast("type[PreTrainedConfig]", model_class.config_class) if is_own_code(model_class) else None


def is_own_code(model_class: type[PreTrainedModel]) -> bool:
    """Return whether the class, or one of its bases, is defined in a model folder."""
    return any(base.__module__.startswith("transformers_modules.") for base in model_class.__mro__)


def _class(reference: str, folder: Path, wanted: type[Any]) -> Any:
    named = cast("object", get_class_from_dynamic_module(reference, str(folder), local_files_only=True))
    if not (isinstance(named, type) and issubclass(named, wanted)):
        raise TypeError(f"`{reference}` is not a `{wanted.__name__}`")
    return named
