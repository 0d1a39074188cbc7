"""Other code for one object: the only way in which ktc changes modules, configs and caches of other libraries.

`Patch` is permanent: a class before the object's own, under the name and module of that class. Patches stack, and each
of them can be removed. Copies keep them, and a pickle names the stock class.
`with_attributes` is a context: it sets attributes of the object itself. Code inside may read the object's exact class.
`called_as` is a context: it replaces calls of a module, without its hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast

from torch import nn

Of = TypeVar("Of")
_MADE: Final[weakref.WeakValueDictionary[tuple[type[Any], tuple[type[Patch], ...]], type[Any]]] = (
    weakref.WeakValueDictionary()
)
_REPLACEMENT: Final = "_ktc_replacement"  # the attribute of a module inside `called_as`


class Patch:
    """A base of classes that precede the class of an object; its methods reach that class by `super()`."""

    @classmethod
    def put_on(cls, target: Of) -> Of:
        """Return `target` itself, whose class is now preceded by this one, once."""
        stock, patches = _parts(type(target))
        if cls not in patches:
            target.__class__ = _patched_class(stock, (cls, *patches))
        return target

    @classmethod
    def remove_from(cls, target: object) -> None:
        """Remove the patch, whether others were put on it or not. Raises ValueError for an object without it."""
        stock, patches = _parts(type(target))
        left = list(patches)
        left.remove(cls)
        target.__class__ = _patched_class(stock, tuple(left)) if left else stock

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by the stock class and the patches, since no module has the class by its name."""
        reduced = super().__reduce_ex__(protocol)
        return reduced if isinstance(reduced, str) else (_empty, _parts(type(self)), *reduced[2:])


def stock_class(target: Of) -> type[Of]:
    """Return the class of an object without its patches."""
    return _parts(type(target))[0]


def _parts(of: type[Of]) -> tuple[type[Of], tuple[type[Patch], ...]]:
    """Return a class without its patches, and the patches; the one that is called first is first."""
    return cast("tuple[type[Of], tuple[type[Patch], ...]]", vars(of).get("_ktc_parts", (of, ())))


def _patched_class(stock: type[Any], patches: tuple[type[Patch], ...]) -> type[Any]:
    """Return the class that is made once for all objects of a class with the same patches."""
    made = _MADE.get((stock, patches))
    if made is None:
        members = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
        made = type(stock.__name__, (*patches, stock), {**members, "_ktc_parts": (stock, patches)})
        _MADE[stock, patches] = made
    return made


def _empty(stock: type[Any], patches: tuple[type[Patch], ...]) -> Any:
    return object.__new__(_patched_class(stock, patches) if patches else stock)


@contextmanager
def with_attributes(target: object, **attributes: object) -> Generator[None]:
    """Set attributes of this one object for a while, past `nn.Module.__setattr__`, which would register modules."""
    present = vars(target)
    before = {name: present[name] for name in attributes if name in present}
    present.update(attributes)
    try:
        yield
    finally:
        for name in attributes.keys() - before.keys():
            present.pop(name, None)
        present.update(before)


class _CalledAs(Patch):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[_REPLACEMENT](*args, **kwargs)


@contextmanager
def called_as(module: nn.Module, replacement: Callable[..., Any]) -> Generator[None]:
    """Send calls of `module` to `replacement`, without the module's hooks.

    Replacing `forward` would run the hooks, and replacing the module would change the tree that PEFT and the layer's
    code look into.
    """
    within_another = isinstance(module, _CalledAs)
    _CalledAs.put_on(module)
    try:
        with with_attributes(module, **{_REPLACEMENT: replacement}):
            yield
    finally:
        if not within_another:
            _CalledAs.remove_from(module)


def call_stock(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call `module` with its hooks and its own code, also inside `called_as`."""
    return stock_class(module).__call__(module, *args, **kwargs)
