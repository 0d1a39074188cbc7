"""`fused`: one kernel computes a router's routing, from the logits to the chosen experts and their weights.

The router keeps its module, its linear layer and its results, so adapters train on it, and hooks see what stock code
gives them. `ktc.model.hf.router` is the code that it receives, `ktc.model.graph.routing` what reads its routing.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, cast

from ktc.model.targets.module_target import ModuleTarget, WrongModule, graph_target
from ktc.model.targets.settings import AUTO, EnumName, PositiveInt
from ktc.model.targets.target import NodeAction, NodeLora, Unsuited

if TYPE_CHECKING:
    from torch import fx, nn

    from ktc.foundation.host import Host
    from ktc.model.graph.routing import RouterCode
    from ktc.model.kernels.kernel_library import Kernel
    from ktc.model.kernels.router_spec import Dtype, RouterSpec
    from ktc.model.kernels.spec import Spec
    from ktc.model.targets.node_plan import CapturedNode, NodePlan

RouterKernel = Annotated[Literal["always", "auto"], EnumName("router_kernel")]
_PLACES: Final = ("layer", "weight", "bias", "correction", "passed")  # of a router's tensors
_DTYPES: Final = ("logits", "scores", "compared", "weights")  # of a form


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The fields of the `RouterForm`, the places of the router's tensors (`RouterLayout`), and the kernel's threads."""

    threads: PositiveInt
    form: Mapping[str, int | float | bool | str | None]
    layer: str
    weight: str
    bias: str
    correction: str
    passed: bool
    hidden: Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True, slots=True)
class Fused(ModuleTarget):
    """The kernel follows from the router's own routing. `auto` is for routers on a GPU, where it saves ten kernels."""

    kernel: RouterKernel = "always"

    name: ClassVar = "fused"
    fixed_facet: ClassVar = "kernel"
    accepts: ClassVar = ("router",)
    module: ClassVar = "fused_router"
    replaces_code: ClassVar = True
    config: ClassVar = RouterConfig

    @property
    def leaves_cpus_to_pytorch(self) -> bool:
        """Whether routers on the CPU keep their own code."""
        return self.kernel == AUTO

    def claimed_of(self, nodes: Sequence[fx.Node], *, whole: bool) -> Sequence[fx.Node]:
        """Return the last node that computes: the router is rewritten as one."""
        from ktc.model.graph import ops

        return [node for node in nodes if ops.operator(node) not in ops.TRANSPARENT | {"getitem", "weight"}][-1:]

    def module_of(self, node: fx.Node) -> str:
        """Return the router's module, "" where the routing is in the code of the block."""
        from ktc.model.graph.routing import NotRead, read_router

        try:
            return read_router(node).module
        except NotRead:
            return str(node.meta.get("called", ""))

    def unsuited(self, seen: CapturedNode) -> Unsuited | None:
        """Return why the router keeps its own code (M095): no kernel computes its routing."""
        from ktc.model.hf.router import DTYPES

        kept = "route by the model's own code", "the model's own code routes"
        if seen.dtype not in DTYPES.values():
            why = f"the model is {seen.dtype}".replace("torch.", "")
            return Unsuited("M095", f"{why}, in which no kernel computes", *kept)
        reading = _reading(seen.core, _Stock(seen.stock))
        return Unsuited("M095", reading, *kept) if isinstance(reading, str) else None

    def choose(self, plan: NodePlan, seen: CapturedNode) -> Spec:
        """Return the kernel for the routing.

        The kernel of the CPU is built for a router on a GPU too, since a loaded model may be moved.
        """
        from ktc.model.hf.router import DTYPES
        from ktc.model.kernels.router_spec import ISAS, RouterSpec

        hidden: Dtype = next(name for name, dtype in DTYPES.items() if dtype == seen.dtype)
        reading = _reading(seen.core, _Stock(seen.stock))
        assert not isinstance(reading, str), "a router that is not read is left out"
        logits, isas = reading.form.dtypes(hidden)["logits"], seen.host.isas
        return RouterSpec("router", reading.form, logits, hidden, next(isa for isa in ISAS if isa in isas))

    def explain(self, plan: NodePlan, seen: CapturedNode, lora: NodeLora | None) -> tuple[str, ...]:
        """Return the routing and the instruction set."""
        spec = cast("RouterSpec", plan.spec)
        if plan.device != "cpu":
            rest = "the rest of calls without gradients by a kernel of the GPU, of others by PyTorch"
            return (f"{spec.form}: logits by PyTorch, {rest}, on {plan.device}",)
        return (f"{spec.form}: logits by PyTorch, the rest by the {spec.isa} kernel, on cpu",)

    def build_reference(self, graph: fx.GraphModule, node: fx.Node, action: NodeAction) -> nn.Module:
        """Return the routing from logits. The router's module in the graph keeps its tensors and children."""
        from ktc.model.graph.routing import read_router
        from ktc.model.hf.router import GraphRouting

        return GraphRouting(read_router(node).form, graph.get_submodule(action.fqn))

    def replace(self, graph: fx.GraphModule, node: fx.Node, action: NodeAction, others: Sequence[NodeAction]) -> None:
        """Put a call of the routing in the place of all nodes from the logits to the results."""
        from ktc.model.graph.routing import is_inside, read_router

        code = read_router(node)
        graph.set_submodule(graph_target(action), self.build_reference(graph, node, action))
        with graph.graph.inserting_after(code.logits):
            call = graph.graph.call_module(graph_target(action), (code.logits, *code.corrections))
        with graph.graph.inserting_after(call):
            results = [graph.graph.call_function(operator.getitem, (call, place)) for place in (0, 1)]
        about = {**asdict(code.form), **{name: getattr(code, name) for name in _PLACES}}
        call.meta = {"op": self.name, "attributes": about, "fqn": action.fqn, "called": code.module}
        call.meta |= {"rule": action.rule, "span": str(action.span), "kernel": self.kernel_name(action)}
        for made, old in zip(results, (code.weights, code.indices), strict=True):
            made.meta = {**old.meta, "op": "getitem"}
            for user in [user for user in old.users if not is_inside(user, code.module)]:
                user.replace_input_with(old, made)

    def recipe(self, action: NodeAction, about: Mapping[str, Any], host: Host) -> RouterConfig:
        """Return the form and the places of the tensors. The dtypes are those of the model that was planned."""
        from ktc.model.kernels.router_spec import RouterForm

        spec = cast("RouterSpec", action.kernel)
        named = {field.name: about[field.name] for field in fields(RouterForm)}
        form = {**named, **{name: getattr(spec.form, name) for name in _DTYPES}}
        return RouterConfig(host.workers, form, **{name: about[name] for name in _PLACES}, hidden=spec.hidden)

    @staticmethod
    def realise(old: nn.Module, config: RouterConfig, kernel: Kernel | None) -> nn.Module:
        """Return the stock module, patched."""
        from ktc.foundation.decode import Undecodable, decode
        from ktc.model.hf.router import RouterLayout, Routing, fused_router, stock_results
        from ktc.model.kernels.router_spec import RouterForm

        layout = RouterLayout(**{name: getattr(config, name) for name in _PLACES}, hidden=config.hidden)
        try:
            form = decode(config.form, RouterForm)
            layout = replace(layout, results=stock_results(old, form, layout))
            return fused_router(old, Routing(form, layout, kernel, config.threads))
        except (Undecodable, ValueError) as error:
            raise WrongModule(f"a `{type(old).__name__}`: {error}") from error


@dataclass(frozen=True, slots=True)
class _Stock:
    """The stock block of a node, which equal nodes share."""

    block: nn.Module = field(compare=False, hash=False)


@lru_cache(maxsize=32)
def _reading(node: fx.Node, stock: _Stock) -> RouterCode | str:
    """Return the router of a captured node, or why no kernel computes it. Sites of one block share their nodes."""
    from torch import nn

    from ktc.model.graph.routing import NotRead, read_router
    from ktc.model.hf.router import RouterLayout, stock_results

    try:
        code = read_router(node)
        if isinstance(stock.block.get_submodule(code.experts), nn.ModuleList):
            raise NotRead("its block loops over a list of experts")
        places = {name: getattr(code, name) for name in _PLACES}
        stock_results(stock.block.get_submodule(code.module), code.form, RouterLayout(**places, hidden="fp32"))
    except (NotRead, ValueError) as error:
        return str(error)
    return code
