"""Resolve the user's MODEL: a folder, a hub id, `tiny:NAME`, or a model object -> `ModelSource`.

Reads config.json and the headers of the weights, never a weight. Refuses anything that is not a model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import environment
from ktc.foundation.decode import read_json
from ktc.foundation.regular_files import read_regular
from ktc.model import twin
from ktc.model.checkpoint import CheckpointIndex, has_weights, open_index
from ktc.model.checkpoint.quantisation_config import unknown_method
from ktc.model.hf import remote_code
from ktc.model.hf.foreign_errors import first_line
from ktc.model.hf.model_names import TINY, looks_like_hub_id, not_a_model, require_config
from ktc.model.hf.stock_model import multimodal_name, quantization_config_of, text_class_name
from ktc.stages.capture.types import ModelSource

_MOST = {"layers": 10_000, "depth": 10_000, "experts": 100_000}


@dataclass(frozen=True, slots=True)
class Reading:
    """How a model is opened. `trust_remote_code` runs its own code; `text_only` leaves out towers for images and sound.

    With `random_weights` the checkpoint is not looked at. With `to_compile`, weights are fetched from the hub, and a
    model that cannot be compiled is to be refused before it is matched.
    """

    trust_remote_code: bool = False
    text_only: bool = False
    random_weights: bool = False
    to_compile: bool = False

    def of(self, model: str | Path | PreTrainedModel) -> ModelSource:
        """Return the source of a model. Raises as `open_model` does."""
        fetch = self.to_compile and not self.random_weights
        source = open_model(model, fetch, trust_remote_code=self.trust_remote_code, text_only=self.text_only)
        return replace(source, index=None) if self.random_weights else source


TO_INSPECT: Final = Reading()


def open_model(
    model: str | Path | PreTrainedModel, fetch_weights: bool = True, *, trust_remote_code: bool = False,
    text_only: bool = False,
) -> ModelSource:  # fmt: skip
    """Open MODEL: its config, and the headers of the weights that are present locally.

    With `text_only` the model is the one that `AutoModelForCausalLM` makes, without towers for images and sound.
    Raises as `_opened` does, and InputRefused for a model without such a part (I123) and for one that is quantised by
    a method that ktc does not read (I117).
    """
    source = _opened(model, fetch_weights, trust_remote_code=trust_remote_code)
    quantised = quantization_config_of(source.config)  # config.json may be all that is there
    if quantised is not None and (unknown := unknown_method(quantised)):
        raise InputRefused(unknown)
    if text_only:
        source.config.architectures = [_text_class(source)]
    return source


def _text_class(source: ModelSource) -> str:
    """Return the name of the class of text alone. Raises InputRefused (I123)."""
    config = source.config
    if multimodal_name(config.model_type) is None or not config.sub_configs:
        message = f"`{source.name}` is a model of text already, so `--text-only` leaves nothing out"
    elif (text := text_class_name(config)) is not None:
        return text
    else:
        message = f"`AutoModelForCausalLM` of transformers does not read the text of `{config.model_type}` alone"
        part = config.get_text_config().model_type
        other = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(part)
        message += f": `{other}` is of checkpoints of `{part}`" if other else ": it has no class for that"
    raise InputRefused(Diagnostic("I123", message, hint="compile it without `--text-only`"))


def _opened(model: str | Path | PreTrainedModel, fetch_weights: bool, *, trust_remote_code: bool) -> ModelSource:
    """Open MODEL.

    Only small files are fetched from the hub without `fetch_weights`. A model object refers to the folder it was loaded
    from, if that is local. Code in a local folder runs only with `trust_remote_code`. Raises InputRefused if MODEL is
    not a folder, has no usable config, has untrusted code of its own, or has damaged weights.
    """
    if isinstance(model, PreTrainedModel):
        name = str(model.name_or_path or "")
        here = Path(name).resolve() if name and (Path(name) / "config.json").is_file() else None
        own_code = here is not None and remote_code.is_own_code(type(model))
        code = remote_code.code_files(here) if here is not None and own_code else {}
        config = model.config
        if multimodal_name(config.model_type) is not None and not own_code:
            config = copy.deepcopy(config)
            config.architectures = [type(model).__name__]  # a config made by hand names none, and text is the default
        return ModelSource(str(here or name or type(model).__name__), here, config, _index(here), own_code, code)
    name = str(model)
    if name.startswith(TINY):
        folder = twin.write(name.removeprefix(TINY), environment.cache_dir() / "models")
    elif Path(name).is_dir():
        folder = Path(name).resolve()
    else:
        # An adapter of a hub model names the hub id as its base, not the local copy.
        folder = _from_hub(name, fetch_weights)
        return ModelSource(name, folder, _read_config(folder), _index(folder) if fetch_weights else None)
    file = remote_code.model_file(folder)
    if trust_remote_code and file is not None:
        code = remote_code.code_files(folder)
        _check_sizes(folder.name, read_json(read_regular(folder / "config.json")))
        config, _ = remote_code.run_code(folder)
        return ModelSource(str(folder), folder, config, _index(folder), own_code=True, code=code)
    if file is not None and not _is_stock(folder):
        raise InputRefused(_untrusted(folder, file))
    return ModelSource(str(folder), folder, _read_config(folder), _index(folder))


def _is_stock(folder: Path) -> bool:
    """Return whether transformers has the model that config.json names, so that no code of the folder is needed."""
    content = cast("dict[str, Any]", read_json(read_regular(folder / "config.json")))
    model_type = str(content.get("model_type"))
    known = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or multimodal_name(model_type) is not None
    return known or _by_architecture(content) is not None


def _untrusted(folder: Path, file: str) -> Diagnostic:
    message = f"`{folder.name}` is a model with code of its own (`{file}`), which ktc does not run unless you trust it"
    return Diagnostic("I108", message, hint=f"read `{folder / file}`, then add `--trust-remote-code`")


def _index(folder: Path | None) -> CheckpointIndex | None:
    return open_index(folder) if folder is not None and has_weights(folder) else None


def _from_hub(name: str, fetch_weights: bool) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if not looks_like_hub_id(name):
        raise InputRefused(not_a_model(name))
    patterns = ["*.json", "*.txt", "*.model", "*.jinja", *(["*.safetensors"] if fetch_weights else [])]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = f"could not be fetched from the hub ({type(error).__name__})"
        hint = "check the name and the network, or give the path of a downloaded folder"
        raise InputRefused(Diagnostic("I101", f"MODEL `{name}` is not a local folder and {why}", hint=hint)) from error


def _read_config(folder: Path) -> PreTrainedConfig:
    path = folder / "config.json"
    require_config(folder)
    try:
        content: object = read_json(read_regular(path))
        if not isinstance(content, dict):
            raise ValueError("the top level is not an object")
        _check_sizes(folder.name, cast("dict[str, Any]", content))
        if known := _by_architecture(cast("dict[str, Any]", content)):
            return known
        return cast("Any", AutoConfig).from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except InputRefused:
        raise
    except Exception as error:  # foreign config classes raise anything on an invalid config
        message = f"config.json of `{folder.name}` is not usable: {first_line(error) or type(error).__name__}"
        raise InputRefused(Diagnostic("I102", message, hint="check it against the model's own page")) from error


def _check_sizes(name: str, content: Mapping[str, Any]) -> None:
    """Raise InputRefused (I103) for more layers or experts than any model has: building them would take hours."""
    parts = [content, *(cast("dict[str, Any]", part) for part in content.values() if isinstance(part, dict))]
    for field, value in (item for part in parts for item in part.items()):
        for what, most in _MOST.items():
            if what in field and isinstance(value, int | float) and value > most:
                message = f"config.json of `{name}` has `{field:.40}` = {value!s:.20}, ktc takes {what} up to {most:,}"
                raise InputRefused(Diagnostic("I103", message, hint="check config.json against the model's own page"))


def _by_architecture(content: dict[str, Any]) -> PreTrainedConfig | None:
    """Return the config of a model with a known class and an unknown `model_type`, otherwise None.

    For example, Kimi-K2 names `DeepseekV3ForCausalLM`.
    """
    if content.get("model_type") in CONFIG_MAPPING:
        return None
    classes = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    named = content.get("architectures")
    kind = classes.get(str(cast("list[object]", named)[0])) if isinstance(named, list) and named else None
    if kind is None:
        return None
    fields = {name: value for name, value in content.items() if name not in ("model_type", "auto_map")}
    return CONFIG_MAPPING[kind].from_dict(fields)
