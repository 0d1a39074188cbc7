"""A config shrunk to the size of a twin: the same class and flags, small dimensions, every kind of layer.

Input: any causal-LM config of transformers. Output: a copy. The meaning of an attribute is read from its name
(`sizes`, `layers`), never from the model's name. An attribute that is missing or None is unchanged. Refused: a config
whose class requires an unknown relation between its sizes.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.hf.foreign_errors import first_line
from ktc.model.twin.layers import shrink_layers
from ktc.model.twin.sizes import VOCAB, Settings, parts_of, shrink_sizes, shrink_tower, widths_between, with_other_sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    Config = TypeVar("Config", bound=PretrainedConfig)

MIN_POSITIONS = 512
_POSITIONS = ("max_position_embeddings", "model_max_length", "max_seq_len")
_PLEASE_REPORT = "please report this model's config: a twin cannot be made of it yet"
_TOKENS = ("_token_id", "_token_index")
_FIRST_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def shrink(config: Config, *, whole: bool = False, second: bool = False) -> Config:
    """Return a small copy of `config`: the same class and flags with small dimensions, `whole` in depth.

    Flags that select another computation keep their meaning: no groups stay no groups, no query compression stays none,
    equal head counts stay equal, a model that begins with dense layers keeps one, and every kind of layer is kept.
    With `whole` every layer is kept. `second` gives other small sizes, to find numbers that depend on a size.
    Raises InputRefused (I103) if the config's class does not accept the small sizes.
    """
    settings: dict[str, Any] = config.to_dict()
    try:
        return type(config).from_dict(_shrunk(settings, {}, whole, second))
    except Exception as error:  # foreign config classes raise anything on sizes that do not fit together
        words = first_line(error.__cause__ or error)
        message = f"no small twin of this `{config.model_type}` config can be made: {words}"
        raise InputRefused(Diagnostic("I103", message, hint=_PLEASE_REPORT)) from error


def _shrunk(old: Settings, parent: Settings, whole: bool, second: bool, *, tower: bool = False) -> dict[str, Any]:
    """Return the settings of a config, or of a part of one whose widths may be in `parent`, such as a `tower`."""
    small = copy.deepcopy(dict(old))
    small.pop("quantization_config", None)
    shrink_sizes(small, {**parent, **old})
    shrink_layers(small, old, whole=whole)
    if "text_config" in old:
        widths_between(small, old)
    if tower:
        shrink_tower(small, old, parent)
    if second:
        with_other_sizes(small)
    _shrink_token_ids(small, old)
    for name in _POSITIONS:
        if isinstance(old.get(name), int):
            small[name] = max(MIN_POSITIONS, old[name])
    for name, part in parts_of(old):
        beside_text = "text_config" in old and name != "text_config"
        small[name] = _shrunk(part, old, whole, second, tower=tower or beside_text)
    return small


def _separate_token_ids(small: dict[str, Any], old: Settings) -> None:
    """Give the ids of a config with towers separate ones from the end of the small vocabulary: each has a meaning."""
    ids = [name for name, value in old.items() if name.endswith(_TOKENS) and isinstance(value, int)]
    if any(isinstance(part.get("vocab_size"), int) for _, part in parts_of(old)):
        order = {number: place for place, number in enumerate(dict.fromkeys(old[name] for name in ids))}
        first = len(_FIRST_TOKENS)
        small |= {
            name: _FIRST_TOKENS.index(name) if name in _FIRST_TOKENS else VOCAB - 1 - order[old[name]]
            for name in ids
            if old[name] >= VOCAB or (name not in _FIRST_TOKENS and old[name] < first)
        }


def _shrink_token_ids(small: dict[str, Any], old: Settings) -> None:
    """Map ids outside the small vocabulary: the first ones get separate ids, the others share the last."""
    vocabulary = small.get("vocab_size")
    if not isinstance(vocabulary, int):
        _separate_token_ids(small, old)
        return
    for name, value in old.items():
        if name.endswith("token_id") and value is not None and not (isinstance(value, int) and value < vocabulary):
            small[name] = _FIRST_TOKENS.index(name) if name in _FIRST_TOKENS else vocabulary - 1
