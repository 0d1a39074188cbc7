"""The `Config` of a module that a rewrite puts: a frozen dataclass, and the one codec between it and `ktc.json`.

In: plain values. Out: the dataclass. Refused (`Undecodable`, with the place): missing and unknown fields, values of
another type, numbers beyond the bounds of their annotation. Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from ktc.foundation.decode import Undecodable, decode
from ktc.model.targets.settings import Bounds

ConfigT = TypeVar("ConfigT")


def read_config(kind: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Return plain values as a config of the class `kind`. Raises `Undecodable`."""
    config = decode(values, kind)
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):  # pyright: ignore[reportArgumentType]
        bounds = next((mark for mark in _marks(hints[field.name]) if isinstance(mark, Bounds)), None)
        number = getattr(config, field.name)
        if bounds is not None and not bounds.low <= number <= bounds.high:
            raise Undecodable(f"expected at least {bounds.low:g} at `.{field.name}`, found {number}")
    return config


def _marks(hint: Any) -> tuple[Any, ...]:
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


def plain(config: Any) -> dict[str, Any]:
    """Return a config as values of JSON."""
    return json.loads(json.dumps(asdict(config)))
