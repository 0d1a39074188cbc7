"""One capture for every compilation of an equal config in a process: a capture is frozen and takes seconds.

Rooms whose subject is what comes after the capture share them (`SHARING`). The rooms `capture`, `census`, `invented`,
`mutants`, `proof` and `rewrite` never do, nor does a test with the fixture `own_captures`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ktc.stages.capture import CapturedModel, ModelSource

SHARING: Final = (
    "adapters", "cli", "end_to_end", "inference/evaluate", "inference/generate", "inference/prove", "model/checkpoint",
    "model/decode_steps", "model/loading", "model/manifest", "model/packed_store", "stages/plan", "tools/bench",
    "tools/llama_factory", "training",
)  # fmt: skip
CAPTURING: Final = ("ktc.compiler", "ktc.stages.proof.twins")  # the modules whose `capture` is shared


def shares(test: str) -> bool:
    """Return whether the room of a test file shares captures; `test` is its path within `tests`."""
    return test.startswith(tuple(f"{room}/" for room in SHARING))


@dataclass(slots=True)
class SharedCaptures:
    """Stands in for `ktc.stages.capture.capture`, which is called once for each config."""

    capture: Callable[[ModelSource], CapturedModel]
    known: dict[tuple[object, ...], CapturedModel] = field(default_factory=dict[tuple[object, ...], "CapturedModel"])

    def __call__(self, source: ModelSource) -> CapturedModel:
        """The capture of this source. Code of a model's own is captured each time: its files may have changed."""
        if source.own_code:
            return self.capture(source)
        key = type(source.config), source.folder is None, content(source)
        if key not in self.known:
            self.known[key] = self.capture(source)
        return replace(self.known[key], source=source)


def content(source: ModelSource) -> str:
    """The config as text, without the folder that it was read from."""
    values = {name: value for name, value in source.config.to_dict().items() if name != "_name_or_path"}
    return json.dumps(values, default=str, sort_keys=True)
