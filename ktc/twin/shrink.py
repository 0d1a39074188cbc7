"""A config shrunk to witness size: the same class and flags, small dimensions, every kind of layer.

In: any causal-LM config of transformers. Out: a copy; the original stays as it is. What an attribute means is read
from its name (`sizes`, `layers`), never from the model's. An attribute that a config lacks, or that is None there,
stays as it is. Refused: a config whose class wants its sizes related in a way that is not known here.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.twin.layers import shrink_layers
from ktc.twin.sizes import Settings, parts_of, shrink_sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    Config = TypeVar("Config", bound=PretrainedConfig)

MIN_POSITIONS = 512
_POSITIONS = ("max_position_embeddings", "model_max_length", "max_seq_len")
_PLEASE_REPORT = "please report this model's config: the witness builder needs to learn it"
_FIRST_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def shrink(config: Config) -> Config:
    """A witness-sized copy of `config`: the same class and flags with small dimensions; `config` stays as it is.

    Flags that choose another computation keep their meaning: no group stays no group, no query compression stays none,
    equal head counts stay equal, a model that begins with dense layers keeps one, and every kind of layer stays.
    Raises InputRefused (I103) where the config's class does not take the small sizes.
    """
    settings: dict[str, Any] = config.to_dict()
    try:
        return type(config).from_dict(_shrunk(settings, {}))
    except Exception as error:  # foreign config classes raise anything on sizes that do not fit together
        words = (str(error.__cause__ or error).strip().splitlines() or [""])[0][:200]
        message = f"no small witness of this `{config.model_type}` config can be made: {words}"
        raise InputRefused(Diagnostic("I103", message, hint=_PLEASE_REPORT)) from error


def _shrunk(old: Settings, parent: Settings) -> dict[str, Any]:
    """The settings of a config, or of a part of one whose widths `parent` may hold."""
    small = copy.deepcopy(dict(old))
    small.pop("quantization_config", None)
    shrink_sizes(small, {**parent, **old})
    shrink_layers(small, old)
    _shrink_token_ids(small, old)
    for name in _POSITIONS:
        if isinstance(old.get(name), int):
            small[name] = max(MIN_POSITIONS, old[name])
    for name, part in parts_of(old):
        small[name] = _shrunk(part, old)
    return small


def _shrink_token_ids(small: dict[str, Any], old: Settings) -> None:
    """Ids that the small vocabulary has not: the first ones have places of their own, others share the last."""
    vocabulary = small.get("vocab_size")
    if not isinstance(vocabulary, int):
        return
    for name, value in old.items():
        if name.endswith("token_id") and value is not None and not (isinstance(value, int) and value < vocabulary):
            small[name] = _FIRST_TOKENS.index(name) if name in _FIRST_TOKENS else vocabulary - 1
