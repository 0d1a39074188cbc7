"""The results of capture: the module tree, one graph per distinct block, and the sites of each graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ktc.foundation.formats import BLOCKS, METHODS
from ktc.model.experts.own_module import OwnExperts
from ktc.model.graph import ops
from ktc.model.graph.typed import dtype_name, named_modules, nodes_of
from ktc.model.hf.stock_model import text_tower

if TYPE_CHECKING:
    from torch import fx
    from transformers import PreTrainedConfig, PreTrainedModel

    from ktc.model.checkpoint import CheckpointIndex

_EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")  # where families write the number of experts
_JOINING = frozenset({"recurrence", "conv1d", "convolution"})  # operators that join positions, besides attention


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as the user named it. `folder` holds config.json; `index` is None without weights."""

    name: str
    folder: Path | None
    config: PreTrainedConfig
    index: CheckpointIndex | None
    own_code: bool = False  # the model's class is defined in the folder, not in transformers
    code: Mapping[str, str] = field(default_factory=dict[str, str])  # sha256 of the code files of such a model


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A parameter or a persistent buffer, by its name in the module that holds it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    trainable: bool  # True for parameters, False for buffers


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """One module of the model: its FQN, class, and its own tensors."""

    fqn: str
    class_name: str
    tensors: tuple[TensorInfo, ...]


@dataclass(frozen=True, slots=True)
class ExpertList:
    """Routed experts that the model keeps as a list of modules at `fqn` (relative to the block).

    `form` names the computation of each expert. `parts` maps `gate`, `up` (or `gate_up`), `down` and their biases to
    the names of the tensors in each expert. In the graph they are one stack at `fqn`, in the layout of the form.
    """

    fqn: str
    count: int
    hidden: int
    intermediate: int
    form: str
    parts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class BlockGraph:
    """One distinct block. `graph` is in normal form, with block-relative FQNs.

    It is None, with the reason in `opaque`, if capture failed or, with the code of the finding in `refuted`, if the
    proof of its rewrite failed: such a block keeps its own code.
    """

    key: str  # "mlp_1": the block's name in its layer and a number
    class_name: str
    graph: fx.GraphModule | None
    opaque: str = ""
    experts: ExpertList | None = None  # the list whose loop the graph replaces
    own_experts: tuple[OwnExperts, ...] = ()  # its experts modules of the model's own code
    refuted: str = ""
    joined: bool = False  # whether its graph joined positions, where it was left as it is later

    @property
    def joins_positions(self) -> bool:
        """Whether it joins positions by a recurrence or a convolution."""
        nodes = [] if self.graph is None else nodes_of(self.graph)
        return self.joined or any(ops.operator(node) in _JOINING for node in nodes)

    @property
    def recurrent(self) -> bool:
        """Whether the graph is that of a recurrent layer, whose core it does not show."""
        return self.graph is not None and any(ops.operator(node) == "recurrence" for node in nodes_of(self.graph))

    @property
    def unchanged(self) -> str:
        """Why the block keeps its own code, as the end of a sentence."""
        return f"its rewrite {self.opaque}" if self.refuted else f"could not be captured: {self.opaque}"


@dataclass(frozen=True, slots=True)
class BlockSite:
    """One occurrence of a block in the model."""

    fqn: str
    layer: int
    block: str


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """A layer's cache for one sequence: bytes per token (of at most `window` tokens, if set), and a fixed size."""

    per_token: int
    fixed: int
    window: int | None


@dataclass(frozen=True, slots=True)
class CapturedModel:
    """A model without its weights: `sites` map each occurrence to one of the distinct `blocks`."""

    source: ModelSource
    model: PreTrainedModel  # on meta tensors: names, classes and shapes only
    modules: tuple[ModuleInfo, ...]
    blocks: tuple[BlockGraph, ...]
    sites: tuple[BlockSite, ...]
    cache: tuple[CacheLayer, ...] | None = None  # by layer; None if the cached forward does not run on meta

    def leaving(self, refuted: Mapping[str, tuple[str, str]]) -> CapturedModel:
        """Return the model with some blocks to be left as they are: by key, the code of the finding and the reason."""
        blocks = tuple(
            replace(b, graph=None, refuted=refuted[b.key][0], opaque=refuted[b.key][1], joined=b.joins_positions)
            if b.key in refuted
            else b
            for b in self.blocks
        )
        return replace(self, blocks=blocks)

    def block(self, key: str) -> BlockGraph:
        """Return the distinct block with this key. The key must exist."""
        return next(b for b in self.blocks if b.key == key)

    def sites_of(self, key: str) -> tuple[BlockSite, ...]:
        """Return the sites of the block `key`, in the order of the layers."""
        return tuple(s for s in self.sites if s.block == key)

    @property
    def text(self) -> str:
        """The start of the FQNs of the language model in a model with towers, "" for a model of text."""
        tower = text_tower(self.model)
        name = next(fqn for fqn, module in named_modules(self.model) if module is tower)
        return f"{name}." if name else ""

    @property
    def towers(self) -> tuple[str, ...]:
        """The FQNs of the modules beside the language model: towers for images and sound, and their projectors."""
        beside = list[str]()
        around = self.text.removesuffix(".")
        while around:
            inner, around = around, around.rpartition(".")[0]
            parent = self.model.get_submodule(around)
            names = (f"{around}.{name}".lstrip(".") for name, _ in parent.named_children())
            beside += [fqn for fqn in names if fqn not in (inner, *self.ends)]
        return tuple(beside)

    @property
    def ends(self) -> tuple[str, str]:
        """The FQNs of the token embedding and of the head that computes logits, empty if missing."""
        table, head = self.model.get_input_embeddings(), cast("object", self.model.get_output_embeddings())
        names = {id(module): fqn for fqn, module in named_modules(self.model)}
        return names.get(id(table), ""), names.get(id(head), "")

    @property
    def stored_format(self) -> str:
        """The format of the experts in a checkpoint of this model, by the config alone: `fp8`, `int4`, or the dtype."""
        asymmetric = f"uint4_g{self.stored_group}"
        if self._weight_settings.get("symmetric", True) is False and asymmetric in BLOCKS:
            return asymmetric
        if self._is_fp4 and self._quantization.get("quant_method") != "mxfp4":
            return "nvfp4"
        method = str(self._quantization.get("quant_method"))
        return (
            dtype_name(self.model.dtype) if method == "modelopt" else METHODS.get(method, dtype_name(self.model.dtype))
        )

    @property
    def stored_group(self) -> int:
        """The weights of a row per scale in fp8 or int4, or per block, by the config alone; 0 if unknown."""
        if self._is_fp4:
            return 32  # the only size in these formats
        match self._quantization.get("weight_block_size"):
            case [int(), int() as columns]:
                return columns
            case _:
                size = self._weight_settings.get("group_size")
        return size if isinstance(size, int) and size > 0 else 0

    @property
    def _is_fp4(self) -> bool:
        """Whether the config is of MXFP4 or NVFP4."""
        method, settings = self._quantization.get("quant_method"), self._weight_settings
        if method == "modelopt":
            return self._quantization.get("quant_algo", "NVFP4") == "NVFP4"
        of_group = (settings.get("type"), settings.get("num_bits"), settings.get("group_size"))
        return method == "mxfp4" or of_group == ("float", 4, 16)

    @property
    def _quantization(self) -> Mapping[str, Any]:
        """`quantization_config` of config.json, empty if missing."""
        return _object(getattr(self.source.config, "quantization_config", None))

    @property
    def _weight_settings(self) -> Mapping[str, Any]:
        """The settings of compressed-tensors for weights, of the first group of modules that has them."""
        groups = _object(self._quantization.get("config_groups"))
        return _object(_object(next(iter(groups.values()), None)).get("weights"))

    @property
    def facts(self) -> dict[str, Any]:
        """The facts `model.*` of the rule language."""
        return {
            "type": self.source.config.model_type,
            "layers": len({s.layer for s in self.sites}),
            "hidden": self._hidden(),
            "experts": self._experts(),
            "recurrent": self._recurrent(),
            "dtype": dtype_name(self.model.dtype),
        }

    def _recurrent(self) -> int:
        """Return the number of layers that join positions by a recurrence or a convolution."""
        joining = {block.key for block in self.blocks if block.joins_positions}
        return len({site.layer for site in self.sites if site.block in joining})

    def _hidden(self) -> int:
        """Return the embedding's width if the config has another name for it; 0 if there is no embedding."""
        width = getattr(self.source.config.get_text_config(), "hidden_size", None)
        if isinstance(width, int):
            return width
        table = getattr(self.model.get_input_embeddings(), "weight", None)
        return int(table.shape[-1]) if table is not None else 0

    def _experts(self) -> int:
        """Return the number of experts per layer from the graphs, otherwise from the config."""
        graphs = [block.graph for block in self.blocks if block.graph is not None]
        nodes = (node for graph in graphs for node in nodes_of(graph) if ops.operator(node) == "experts")
        seen = [int(ops.attributes(node)["num_experts"]) for node in nodes]
        config = self.source.config.get_text_config()
        counts = [getattr(config, name, None) for name in _EXPERT_COUNTS]
        return max(seen, default=next((count for count in counts if isinstance(count, int) and count), 0))


def _object(value: object) -> Mapping[str, Any]:
    """Return a JSON object, empty for any other value."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
