"""The configs of all modules that a recipe puts in place, by the name of the module in `ktc.json`.

Most are those of rewrite targets. The others prepare a module for the step that follows, or hold weights elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ktc.model.experts.layouts.own_layout import Called, Role, TensorLayout
from ktc.model.targets import MODULES
from ktc.model.targets.kt_linear import STORED_LINEAR, StoredLinearConfig
from ktc.model.targets.settings import PositiveInt

GRAPH_BLOCK, OWN_EXPERTS, STREAMED_LINEAR = "graph_block", "own_experts", "streamed_linear"
HOST_TABLE = "host_table"


@dataclass(frozen=True, slots=True)
class GraphBlockConfig:
    """A block whose code loops over its list `experts`: the `file` of its graph, and where `parts` are in an expert."""

    file: str
    experts: str
    num_experts: PositiveInt
    hidden: PositiveInt
    intermediate: PositiveInt
    form: str
    parts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class OwnExpertsConfig:
    """An experts module of the model's own: where its `parts` are, and the roles of its `forward`'s parameters."""

    num_experts: PositiveInt
    hidden: PositiveInt
    intermediate: PositiveInt
    form: str
    parts: Mapping[str, TensorLayout]
    inputs: Mapping[str, Role]
    called: Called


@dataclass(frozen=True, slots=True)
class StreamedLinearConfig:
    """The bytes that weights pass through on the device."""

    stream_buffer: PositiveInt


@dataclass(frozen=True, slots=True)
class HostTableConfig:
    """A table of embeddings in host memory, whose rows a GPU reads."""


CONFIGS: Final[Mapping[str, type[Any]]] = {
    **{name: target.config for name, target in MODULES.items()},
    GRAPH_BLOCK: GraphBlockConfig,
    OWN_EXPERTS: OwnExpertsConfig,
    STREAMED_LINEAR: StreamedLinearConfig,
    HOST_TABLE: HostTableConfig,
    STORED_LINEAR: StoredLinearConfig,
}
