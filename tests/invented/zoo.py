"""All families of the zoo, and the models to compile: each family and its near-twin."""

from __future__ import annotations

from invented.family import Case, Family
from invented.kinds import (
    attention,
    capacity,
    derived,
    implementations,
    layers,
    left_behind,
    nested_configs,
    overflow,
    own_experts,
    recorded,
    routing,
    shared,
    state,
    structure,
    training,
)

_KINDS = (
    derived, own_experts, layers, training, capacity, left_behind, routing, structure, shared, nested_configs,
    attention, recorded, implementations, state, overflow,
)  # fmt: skip
FAMILIES: tuple[Family, ...] = tuple(family for kind in _KINDS for family in kind.FAMILIES)
CASES: tuple[Case, ...] = tuple(Case(family, is_near) for family in FAMILIES for is_near in (False, True))
