"""The state of packed weights: waiting for a load, loaded, or in the layout that kernels read.

In: which parts are loaded, and calls of `restore` and `process`. Out: a `LoadState`, and a located refusal (L460) of
computing with incomplete weights.

A first load ends in KERNEL_LAYOUT: each part is written in the kernel's own layout, and nothing was derived from an
earlier one. After `restore` it ends in PACKED_CANONICAL, and `process` renews derived data (copies on a GPU).
Memory stays where it is, so addresses in captured steps stay valid.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable
from typing import Any, Generic, TypeVar

from ktc.diagnostics import Diagnostic, InputRefused

Part = TypeVar("Part", bound=Hashable)


class LoadState(enum.Enum):
    """The cycle of packed weights: restored for a load, loaded, and processed."""

    AWAITING_LOAD = "awaiting a load"
    PACKED_CANONICAL = "loaded, and not processed yet"
    KERNEL_LAYOUT = "in the layout of their kernel"


class Loads(Generic[Part]):
    """The parts of some packed weights, and their state. Copies of a module share it with the memory."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = frozenset(parts)
        self.missing = set(self._parts)
        self._restored_at: str | None = None  # the name of the module, since `restore` and until `process`
        self.generation = 0  # of the weights: how often they were replaced

    @property
    def state(self) -> LoadState:
        """The present state."""
        if self.missing:
            return LoadState.AWAITING_LOAD
        return LoadState.KERNEL_LAYOUT if self._restored_at is None else LoadState.PACKED_CANONICAL

    def restore(self, name: str) -> None:
        """Await a load of all parts. `name` is that of the module, for messages."""
        self.missing, self._restored_at = set(self._parts), name

    def loaded(self, part: Part) -> None:
        """Count a part as loaded."""
        self.missing.discard(part)

    def loaded_all(self) -> None:
        """Count all parts as loaded."""
        self.missing.clear()

    def process(self) -> bool:
        """Admit calls; return whether they were not admitted before. Raises InputRefused (L460) for missing parts."""
        if self.missing:
            raise self._refusal()
        changed, self._restored_at = self._restored_at is not None, None
        self.generation += changed
        return changed

    def require_processed(self, generation: int = 0) -> None:
        """Raise InputRefused (L460) between `restore` and `process`, and for a copy that knows another generation."""
        if self._restored_at is not None:
            raise self._refusal()
        if generation != self.generation:
            message = "the experts that this model shares with a copy were replaced there, and its other weights not"
            raise InputRefused(Diagnostic("L460", message, hint="copy or load the model again"))

    def separate(self) -> Loads[Part]:
        """Return the state of copies of these weights in memory of their own."""
        made = Loads(self._parts)
        made.missing, made._restored_at, made.generation = set(self.missing), self._restored_at, self.generation
        return made

    def _refusal(self) -> InputRefused:
        where = f"`{self._restored_at}` is" if self._restored_at else "these weights are"
        counted = f", of which {len(self.missing):,} of {len(self._parts):,} parts are missing" if self.missing else ""
        hint = "`load_weights(FOLDER)` and then `process_weights()`, or `refresh(FOLDER)` for both"
        return InputRefused(Diagnostic("L460", f"{where} {self.state.value}{counted}", hint=hint))

    def __deepcopy__(self, memo: dict[int, Any]) -> Loads[Part]:
        return self
