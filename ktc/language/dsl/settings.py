"""The settings of rewrite targets as types of the rule language, read from the annotations of the targets' fields.

In: a target's class. Out: the type, default and bounds of each setting, and the words that an annotation lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, fields
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from ktc.language.dsl.types import BOOL, FLOAT, INT, STRING, Type
from ktc.model.targets.settings import Bounds, EnumName, Value
from ktc.model.targets.target import Target

_SCALARS = {int: INT, float: FLOAT, bool: BOOL, str: STRING}


@dataclass(frozen=True, slots=True)
class SettingSpec:
    """One setting of a target. `required` wins over `default`; a default of `None` leaves the choice to the plan."""

    type: Type
    default: Value
    required: bool
    bounds: Bounds | None


@dataclass(frozen=True, slots=True)
class _Annotation:
    """A field's annotation: a type with its marks, alone or in a tuple."""

    base: Any
    words: EnumName | None
    bounds: Bounds | None
    many: bool

    @property
    def type(self) -> Type:
        name = self.words.name if self.words else _SCALARS[self.base].name
        return Type(name, "list" if self.many else "one")


def settings_of(target: type[Target]) -> dict[str, SettingSpec]:
    """Return the settings by name, in the order of the fields."""
    annotations = _annotations(target)
    return {
        field.name: SettingSpec(read.type, _default(field), field.default is MISSING, read.bounds)
        for field in fields(target)
        for read in (annotations[field.name],)
    }


def _default(field: Field[Any]) -> Value:
    return None if field.default is MISSING else field.default


def words_of(targets: Iterable[type[Target]]) -> dict[str, tuple[str, ...]]:
    """Return the enums whose words the annotations of targets list, by name."""
    enums: dict[str, tuple[str, ...]] = {}
    for read in (read for target in targets for read in _annotations(target).values()):
        if read.words is not None and get_origin(read.base) is Literal:
            listed = enums.setdefault(read.words.name, get_args(read.base))
            assert listed == get_args(read.base), f"two targets list different words for `{read.words.name}`"
    return enums


def _annotations(target: type[Target]) -> dict[str, _Annotation]:
    hints = get_type_hints(target, include_extras=True)
    return {field.name: _read(hints[field.name]) for field in fields(target)}


def _read(hint: Any, many: bool = False) -> _Annotation:
    if NoneType in get_args(hint):
        return _read(next(option for option in get_args(hint) if option is not NoneType))
    if get_origin(hint) is tuple:
        return _read(get_args(hint)[0], many=True)
    base, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    words = next((mark for mark in marks if isinstance(mark, EnumName)), None)
    bounds = next((mark for mark in marks if isinstance(mark, Bounds)), None)
    return _Annotation(base, words, bounds, many)
