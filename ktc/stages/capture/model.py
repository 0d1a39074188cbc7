"""Capture of a causal LM: its config alone -> module tree, distinct blocks as graphs, and their sites.

The model is built on meta tensors and run there once, with every block's call recorded. Each distinct block is then
exported once (`identity` says which blocks are equal).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager

import torch
import transformers
from torch import Tensor, fx, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.stage_progress import counted
from ktc.model.graph import ops
from ktc.model.graph.typed import dtype_name, named_modules, nodes_of
from ktc.model.hf import stock_model
from ktc.model.hf.foreign_errors import first_line, of_another_version, raised_by
from ktc.model.hf.named_class import not_a_causal_lm
from ktc.model.linears.plain import is_plain_linear
from ktc.stages.capture.cache import measure_cache
from ktc.stages.capture.canonical import NoExperts
from ktc.stages.capture.data_masks import check_masks, masks_from_data
from ktc.stages.capture.expert_list import candidates
from ktc.stages.capture.experts_block import more_than_experts
from ktc.stages.capture.export import export_block
from ktc.stages.capture.forms import UNSUPPORTED
from ktc.stages.capture.identity import identity_of
from ktc.stages.capture.length import reason_not_exported
from ktc.stages.capture.loop import capture_loop
from ktc.stages.capture.markers import marked, masks_given
from ktc.stages.capture.normal_form import normalise
from ktc.stages.capture.own_markers import not_recognised, recognised
from ktc.stages.capture.reasons import reason_of
from ktc.stages.capture.record import Call, record
from ktc.stages.capture.recurrence import recurrent_graph
from ktc.stages.capture.shared_weights import shared_names, sharing
from ktc.stages.capture.trace import recording_reads
from ktc.stages.capture.types import (
    BlockGraph,
    BlockSite,
    CapturedModel,
    ModelSource,
    ModuleInfo,
    TensorInfo,
)


def capture(source: ModelSource) -> CapturedModel:
    """Capture the model of `source`. No weight is read.

    Raises InputRefused if transformers cannot build the model or it has no decoder layers.
    """
    model = build_on_meta(source.config)
    _check_class(source, type(model))
    layers_fqn, layers = _decoder_layers(model, stock_model.text_tower(model))
    blocks = {
        f"{layers_fqn}.{i}.{name}": (i, child) for i, layer in enumerate(layers) for name, child in _blocks(layer)
    }
    shared = shared_names(model)
    with marked(model):
        calls, failed = record(model, {fqn: block for fqn, (_, block) in blocks.items()})
        called = {fqn: site for fqn, site in blocks.items() if fqn in calls}
        identities = {
            fqn: (_identity(block, calls[fqn], failed.get(fqn), layer), bool(sharing(fqn, block, shared)))
            for fqn, (layer, block) in called.items()
        }
        graphs, distinct = dict[object, BlockGraph](), dict[object, str]()
        for fqn, identity in identities.items():
            distinct.setdefault(identity, fqn)
        for identity, fqn in counted(distinct.items(), len(distinct)):
            block = called[fqn][1]
            stem = next(part for part in reversed(fqn.split(".")) if not part.isdigit())
            key = f"{stem}_{sum(g.key.startswith(stem + '_') for g in graphs.values())}"
            with _own_masks(block, calls[fqn]):
                graph = _capture_block(key, block, calls[fqn], failed.get(fqn))
            reason = sharing(fqn, block, shared, _experts_of(graph))
            graphs[identity] = BlockGraph(key, graph.class_name, None, reason) if reason else graph
        sites = tuple(BlockSite(fqn, called[fqn][0], graphs[identity].key) for fqn, identity in identities.items())
        cache = measure_cache(model)
    return CapturedModel(source, model, _module_tree(model), tuple(graphs.values()), sites, cache)


def _identity(block: nn.Module, call: Call, failure: str | None, layer: int) -> object:
    """Return a value that is equal for blocks that behave alike."""
    with recording_reads() as reads:
        behaviour = identity_of(block, call, failure, layer)
    return behaviour, repr(sorted((name, sorted(values)) for name, values in reads.items()))


def _experts_of(block: BlockGraph) -> frozenset[str]:
    """Return the modules in a captured block whose weights kernels pack."""
    if block.experts is not None:
        return frozenset({block.experts.fqn})
    nodes = nodes_of(block.graph) if block.graph is not None else ()
    return frozenset(str(node.meta.get("fqn", "")) for node in nodes if ops.operator(node) == "experts")


@contextmanager
def _own_masks(block: nn.Module, call: Call) -> Generator[None]:
    """Prepare a block that was recorded with an explicit mask, since it computes with one."""
    if not isinstance(call[1].get("attention_mask"), Tensor):
        yield
        return
    with masks_given(), masks_from_data(block, block, *call):
        yield


def _check_class(source: ModelSource, model_class: type[PreTrainedModel]) -> None:
    """Check that transformers has no other class of that name, since a compiled model finds its class by name.

    Code that a class runs after its weights are read is not run for a compiled model, so it is refused, and so is a
    class of transformers that generates in a way of its own.
    """
    name = model_class.__name__
    named = getattr(transformers, name, model_class)
    if model_class.__module__.startswith("transformers.") and not issubclass(model_class, GenerationMixin):
        message = f"`{name}` does not generate token by token: its generation is code of its own"
        raise InputRefused(
            Diagnostic("I125", message, hint="ktc compiles models that `GenerationMixin` generates with")
        )
    if source.folder is not None and not source.own_code and named is not model_class:
        message = f"`{name}` is of `{model_class.__module__}`, and transformers has another class of that name"
        hint = "give the folder that its code came from, with `--trust-remote-code`"
        raise InputRefused(Diagnostic("I109", message, hint=hint))
    if not model_class.from_pretrained.__module__.startswith("transformers."):
        message = f"`{name}` has a `from_pretrained` of its own, which a compiled model would not run"
        raise InputRefused(Diagnostic("I109", message, hint="move what it does to `__init__`"))


def build_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the stock model of `config` on meta tensors, in its own dtype, in eval mode."""
    try:
        return stock_model.build_on_meta(config, getattr(config, "dtype", None) or torch.float32)
    except Exception as error:  # foreign model classes raise anything on an unsuitable config
        named = f"(`model_type` = `{config.model_type}`)"
        message = f"transformers cannot build a causal LM from this config {named}: {first_line(error)}"
        hint = not_a_causal_lm(config) or of_another_version(config) or raised_by(error)
        raise InputRefused(Diagnostic("I103", message, hint=hint)) from error


def _decoder_layers(model: nn.Module, text: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the ModuleList of `text` with the most parameters: the stack of decoder layers under any name."""
    of_text = {id(module) for module in text.modules()}
    named = ((fqn, m) for fqn, m in named_modules(model) if id(m) in of_text)
    lists = [(fqn, m) for fqn, m in named if isinstance(m, nn.ModuleList) and len(m) > 0]
    if not lists:
        message = f"`{type(model).__name__}` has no stack of decoder layers"
        raise InputRefused(Diagnostic("I104", message, hint="ktc compiles decoder-only causal LMs"))
    return max(lists, key=lambda item: (sum(p.numel() for p in item[1].parameters()), -len(item[0])))


def _blocks(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children that have children of their own; for a list of such modules, its members."""
    for name, child in layer.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{inner}", block) for inner, block in _blocks(child))
        elif any(True for _ in child.children()):
            yield name, child


def _capture_block(key: str, block: nn.Module, call: Call, failure: str | None) -> BlockGraph:
    name = type(block).__name__
    if failure is not None:
        return BlockGraph(key, name, None, "; ".join(filter(None, (failure, not_recognised(block)))))
    no_experts = ""
    try:
        loop = capture_loop(block, *call)
        if loop is not None:
            return BlockGraph(key, name, _with_own_linears(loop[0], block), experts=loop[1])
    except Exception as error:  # noqa: BLE001 - as below; a list of modules is not always a loop over experts
        no_experts = str(error) if isinstance(error, NoExperts) else reason_of(error)
    with contextlib.suppress(
        Exception
    ):  # the block's own code runs for it, and may raise anything: it is exported then
        if (recurrent := recurrent_graph(block, *call)) is not None:
            return BlockGraph(key, name, _with_own_linears(recurrent, block))
    try:
        if long := reason_not_exported(block, *call):
            return BlockGraph(key, name, None, long)
        graph = _with_own_linears(normalise(export_block(block, *call)), block)
        check_masks(graph)
    except Exception as error:  # noqa: BLE001 - export raises anything; the block stays opaque and keeps the reason
        return BlockGraph(key, name, None, no_experts or _not_experts(block) + reason_of(error))
    experts = [node for node in nodes_of(graph) if node.target is ops.experts]
    own_experts = recognised(block)
    if any(node.meta.get("fqn") == "" for node in experts) and (
        more := more_than_experts(graph, named=bool(own_experts))
    ):
        return BlockGraph(key, name, None, more)
    forms = [str(node.args[5]) for node in experts]
    unsupported = next((form for form in forms if form.startswith(UNSUPPORTED)), None)
    return (
        BlockGraph(key, name, None, unsupported)
        if unsupported
        else BlockGraph(key, name, graph, own_experts=own_experts)
    )


def _not_experts(block: nn.Module) -> str:
    """Return that the lists of a block hold no experts, to begin the reason why it cannot be captured."""
    named = next((fqn for fqn, _ in candidates(block)), None)
    return "" if named is None else f"the modules of `{named}` are not MLPs that kernels compute, and "


def _with_own_linears(graph: fx.GraphModule, block: nn.Module) -> fx.GraphModule:
    """Name the products in linear layers with code of their own `own_linear`: replacing such a layer loses the code."""
    modules = dict(named_modules(block))
    for node in nodes_of(graph):
        if ops.operator(node) == "linear":
            owner = str(node.meta.get("fqn", ""))
            module = modules.get(owner)
            if isinstance(module, nn.Linear) and not is_plain_linear(module):
                node.meta["op"] = "own_linear"
    return graph


def _module_tree(model: nn.Module) -> tuple[ModuleInfo, ...]:
    stored = model.state_dict().keys()
    return tuple(
        ModuleInfo(fqn, type(module).__name__, tuple(_tensors(fqn, module, stored)))
        for fqn, module in named_modules(model)
    )


def _tensors(fqn: str, module: nn.Module, stored: Collection[str]) -> Iterator[TensorInfo]:
    """Yield the module's own parameters, then its own buffers that a state dict stores."""
    for name, parameter in module.named_parameters(recurse=False):
        yield _tensor_info(name, parameter, trainable=True)
    for name, buffer in module.named_buffers(recurse=False):
        if f"{fqn}.{name}".lstrip(".") in stored:
            yield _tensor_info(name, buffer, trainable=False)


def _tensor_info(name: str, tensor: Tensor, *, trainable: bool) -> TensorInfo:
    size = tensor.numel() * tensor.element_size()
    return TensorInfo(name, tuple(tensor.shape), dtype_name(tensor.dtype), size, trainable)
