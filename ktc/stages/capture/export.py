"""Export one block to a runnable graph on meta tensors, with dynamic batch and sequence and parameters by FQN.

Input: a module and the arguments of its call in a meta forward. Output: a functional ATen GraphModule. Its placeholders
are the block's tensor inputs, its parameters `get_attr` nodes at block-relative FQNs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from ktc.model.experts.private_api import pytree
from ktc.model.graph.typed import attach_tensor, nodes_in, owner_of
from ktc.stages.capture.markers import semantic_function
from ktc.stages.capture.own_markers import STOCK
from ktc.stages.capture.size_guards import violated_guard
from ktc.stages.capture.trace import silent_torch

# Two sizes that differ from all model dimensions; their product is the number of tokens.
BATCH, SEQUENCE = 3, 7
# Composite operators that are not decomposed, since they are operators of the normal form.
_KEEP = frozenset({
    "linear", "silu", "gelu", "softmax", "sigmoid", "rms_norm", "scaled_dot_product_attention", "topk", "split",
    "split_with_sizes", "chunk", "clamp", "clamp_min", "clamp_max", "one_hot", "embedding", "layer_norm", "masked_fill",
    "conv1d", "softplus", "detach",
})  # fmt: skip
_DROP = frozenset({"_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size"})

Rebuild = Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
Around = Callable[[], AbstractContextManager[None]]


class _TensorsOnly(nn.Module):
    """The block with a signature of tensors alone, so that export sees no cache, keyword or tuple."""

    def __init__(self, block: nn.Module, rebuild: Rebuild, around: Around, whole: bool) -> None:
        super().__init__()
        self.block, self._rebuild, self._around, self._whole = block, rebuild, around, whole

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        args, kwargs = self._rebuild(tensors)
        with self._around():
            result = self.block(*args, **kwargs)
        hidden = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
        return result if self._whole else main_output(result, hidden)


def export_block(
    block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any],
    around: Around = nullcontext, *, whole: bool = False,
) -> fx.GraphModule:  # fmt: skip
    """Export `block` as called with `args` and `kwargs` (meta tensors), inside `around`.

    The graph returns the hidden states, or with `whole` the tuple of tensors that the block returns. Raises the
    exceptions of torch.export; with `whole` also SizeBranch for a block that computes something else at other sizes.
    """
    names, tensors, rebuild = flatten_call(args, kwargs)
    dynamic = tuple(
        {i: Dim.AUTO for i, size in enumerate(t.shape) if size in (BATCH, SEQUENCE, BATCH * SEQUENCE)} for t in tensors
    )
    with silent_torch():
        wrapped = _TensorsOnly(block, rebuild, around, whole)
        program = torch.export.export(wrapped, tensors, dynamic_shapes=(dynamic,), strict=False)
        if whole and (guard := violated_guard(program)):
            raise SizeBranch(f"it computes something else for calls of another length (unless {guard})")
        program = program.run_decompositions(dict(_decompositions()))
    return _lower(program, block, names)


class SizeBranch(Exception):
    """The block has a branch on the size of its input; the message has the condition."""


def main_output(result: Tensor | tuple[Any, ...], given: Tensor | None = None) -> Tensor:
    """Return the hidden states of a block's result: the result itself, or an element of a tuple.

    It is the first element, unless that has another rank or width than the hidden states `given` and a later one has
    the same: some blocks return their router's logits first.
    """
    if not isinstance(result, tuple):
        return result
    if given is None:
        return result[0]
    alike = (part for part in result if isinstance(part, Tensor) and _ranked(part) == _ranked(given))
    return next(alike, result[0])


def _ranked(tensor: Tensor) -> tuple[int, Any]:
    return tensor.dim(), tensor.shape[-1] if tensor.dim() else 0


def flatten_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[str], tuple[Tensor, ...], Rebuild]:
    """Return the tensors of a call, their placeholder names, and a function that calls with other tensors."""
    named, spec = pytree.tree_flatten_with_path((args, dict(kwargs)))
    names = [_input_name(path) for path, leaf in named if isinstance(leaf, Tensor)]
    tensors = tuple(leaf for _, leaf in named if isinstance(leaf, Tensor))
    constants = [None if isinstance(leaf, Tensor) else (leaf,) for _, leaf in named]

    def rebuild(replacements: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        remaining = iter(replacements)
        leaves = [next(remaining) if constant is None else constant[0] for constant in constants]
        return pytree.tree_unflatten(leaves, spec)

    return names, tensors, rebuild


def _input_name(path: tuple[Any, ...]) -> str:
    """Return an input's name, such as `hidden_states` or `position_embeddings_0`: keyword and position in a tuple."""
    keys = [str(getattr(key, "key", getattr(key, "idx", key))) for key in path[1:]]
    if keys and keys[0].isdigit():
        keys[0] = "hidden_states" if keys[0] == "0" else f"input_{keys[0]}"
    return "_".join(keys)


@cache
def _decompositions() -> Mapping[Any, Any]:
    """Return Torch's table without the operators of the normal form; building it takes a tenth of a second."""
    table = torch.export.default_decompositions()
    for op in list(table):
        if op.name().split("::")[1].partition(".")[0] in _KEEP:  # "aten::softmax.int"
            table.pop(op)
    return table


def _lower(program: ExportedProgram, block: nn.Module, input_names: Sequence[str]) -> fx.GraphModule:
    """Convert an exported program: parameters become attributes, checks are removed, markers become functions."""
    signature = program.graph_signature
    stored_names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    constants = dict(signature.inputs_to_lifted_tensor_constants)
    root, graph, copies, names = nn.Module(), fx.Graph(), dict[fx.Node, fx.Node](), iter(input_names)
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in stored_names:
            stored = stored_names[node.name].removeprefix("block.")
            fqn = stored.replace(f"{STOCK}.", "")  # in the graph, such a module has the tensors of its stock layout
            attach_tensor(root, fqn, getattr(*owner_of(block, stored)))
            copies[node] = graph.get_attr(fqn)
        elif node.op == "placeholder" and node.name in constants:
            fqn = f"constants.{node.name}"
            constant = program.constants[constants[node.name]]
            assert isinstance(constant, Tensor), f"the constant `{node.name}` is not a tensor"
            attach_tensor(root, fqn, constant)
            copies[node] = graph.get_attr(fqn)
        elif node.op == "placeholder":
            copies[node] = graph.placeholder(next(names))
        elif node.op == "output":
            results = [copies[result] for result in nodes_in(node.args[0])]
            graph.output(tuple(results) if len(results) > 1 else results[0])
            continue
        elif getattr(getattr(node.target, "overloadpacket", None), "__name__", "") in _DROP:
            continue
        else:
            copies[node] = _copy_call(graph, node, copies)
        copies[node].meta = {"val": node.meta.get("val"), **_called_in(node)}
    graph.eliminate_dead_code()
    return fx.GraphModule(root, graph, class_name=type(block).__name__)


def _called_in(node: fx.Node) -> dict[str, str]:
    """Return the module inside the block whose code runs a node, as `called`; empty if export does not report it."""
    stack: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return {"called": paths[-1].removeprefix("block").removeprefix(".")} if paths else {}


def _copy_call(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    copy = graph.node_copy(node, lambda n: copies[n])
    function = semantic_function(copy.target)
    if function is not None:
        copy.target = function
    elif copy.target is torch.ops.aten.view.default:
        # Real strides may differ from those on meta; reshape returns a view wherever possible.
        copy.target = torch.ops.aten.reshape.default
    if str(copy.kwargs.get("device")) == "meta":
        copy.kwargs = {k: v for k, v in copy.kwargs.items() if k not in ("device", "pin_memory", "layout")}
    return copy
