"""The assumptions of the rewrites about a model, as `ktc.json` records them, and their comparison.

Only modules that a rewrite replaces count: routers, attention and all other stock code still run as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AssumedModule:
    """A stock module that was replaced, or one below it; `name` is relative, `*` for all numbers of equal modules.

    `attributes` has the spelling of its plain attributes.
    """

    name: str
    class_name: str
    attributes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class AssumedSites:
    """The sites of the model with these modules."""

    sites: tuple[str, ...]
    modules: tuple[AssumedModule, ...]


@dataclass(frozen=True, slots=True)
class Assumptions:
    """`config` has the spelling of the values that replaced code reads in a call, by path (`config.limit`).

    `code` has the sha256 of the source of each replaced class.
    """

    config: Mapping[str, str]
    sites: tuple[AssumedSites, ...]
    code: Mapping[str, str]


NO_ASSUMPTIONS = Assumptions({}, (), {})


def differences(assumed: Assumptions, present: Assumptions) -> Iterator[str]:
    """Yield a sentence for each value that differs, in sites of both: "`config.limit` is 3.0, and was 7.0 ..."."""
    yield from _changes("`{}`", assumed.config, present.config)
    theirs = {site: row.modules for row in present.sites for site in row.sites}
    for row in assumed.sites:
        for site in row.sites:
            if site in theirs:
                yield from _changed_modules(site, row.modules, theirs[site])


def _changed_modules(
    site: str, before: tuple[AssumedModule, ...], after: tuple[AssumedModule, ...]
) -> Iterator[str]:  # fmt: skip
    now = {module.name: module for module in after}
    for module in before:
        where, replacement = ".".join(filter(None, (site, module.name))), now.get(module.name)
        if replacement is None or replacement.class_name != module.class_name:
            yield f"`{where}` is not the `{module.class_name}` that was compiled"
        else:
            yield from _changes(f"`{{}}` of `{where}`", module.attributes, replacement.attributes)


def _changes(what: str, before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(before):
        if before[name] != after.get(name):
            now = after.get(name, "missing")
            yield f"{what.format(name)} is {now}, and was {before[name]} when the model was compiled"


def changed_code(assumed: Assumptions, present: Assumptions) -> tuple[str, ...]:
    """Return the classes whose code is not the code that was compiled."""
    return tuple(name for name, sha256 in assumed.code.items() if present.code.get(name, sha256) != sha256)
