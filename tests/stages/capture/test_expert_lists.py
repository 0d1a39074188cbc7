"""Experts in a list of modules: every spelling of the loop over them becomes the same graph, and what is none stays."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from places import REMOTE_CODE
from torch import Tensor, fx, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_of
from ktc.stages.capture import BlockGraph, CapturedModel, ExpertList, ModelSource, capture, markers
from ktc.stages.capture.canonical import NoExperts, same_computation
from ktc.stages.capture.expert_hits import DependsOnData
from ktc.stages.capture.expert_list import candidates, expert_list
from ktc.stages.capture.loop import capture_loop
from ktc.stages.capture.reasons import reason_of
from ktc.stages.capture.record import _run_block

HIDDEN, INNER, EXPERTS = 32, 24, 4
LOOPS = ("range", "hit", "where", "repeat", "sort", "dense", "sum")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def _orchard_can_be_imported() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REMOTE_CODE))
        markers._library()
        yield
        for name in [name for name in sys.modules if name.partition(".")[0] == "orchard"]:
            del sys.modules[name]


def grove(loop: str) -> nn.Module:
    config = importlib.import_module("orchard.configuration_orchard").OrchardConfig(
        hidden_size=HIDDEN, picker_width=INNER, pickers=EXPERTS, loop=loop
    )
    with torch.device("meta"):
        return importlib.import_module("orchard.modeling_orchard").OrchardGrove(config).eval()


def captured(block: nn.Module) -> tuple[fx.GraphModule, ExpertList]:
    found = capture_loop(block, (torch.empty(3, 7, HIDDEN, device="meta"),), {})
    assert found is not None
    return found


@pytest.fixture(scope="module")
def by_range(_orchard_can_be_imported: None) -> fx.GraphModule:
    return captured(grove("range"))[0]


def test_a_loop_becomes_one_experts_node_behind_the_router(by_range: fx.GraphModule) -> None:
    computing = [n.meta["op"] for n in nodes_of(by_range) if n.meta["op"] not in ops.TRANSPARENT]
    computing = [op for op in computing if op not in ("weight", "input", "output", "getitem", "sym_size")]
    assert computing == ["linear", "softmax", "topk", "sum", "div", "experts"]
    assert next(n.meta["fqn"] for n in nodes_of(by_range) if n.meta["op"] == "experts") == "pickers"


@pytest.mark.parametrize("loop", LOOPS[1:])
def test_every_spelling_of_the_loop_is_the_same_graph(loop: str, by_range: fx.GraphModule) -> None:
    graph, experts = captured(grove(loop))
    assert operators(graph) == operators(by_range)
    assert experts.parts == {"gate": "w1.weight", "up": "w3.weight", "down": "w2.weight"}


class Compared(nn.Module):
    """A loop over `where(chosen == number)`, of which there may be as many experts as a call has tokens."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, experts, bias=False)
        modeling = importlib.import_module("orchard.modeling_orchard")
        config = importlib.import_module("orchard.configuration_orchard").OrchardConfig(
            hidden_size=HIDDEN, picker_width=INNER
        )
        self.pickers = nn.ModuleList(modeling.OrchardPicker(config) for _ in range(experts))

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, HIDDEN)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for number, picker in enumerate(self.pickers):
            token, slot = torch.where(chosen == number)
            out.index_add_(0, token, picker(flat[token]) * weights[token, slot, None])
        return out.view_as(hidden_states)


def test_a_call_with_as_many_tokens_as_experts_is_no_special_case() -> None:
    with torch.device("meta"):
        block = Compared(16).eval()
    assert captured(block)[1].count == 16


class One(Compared):
    """One expert for each token: its number and its weight are vectors, and the router's weight is used directly."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, HIDDEN)
        weights, chosen = F.linear(flat, self.gate.weight).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, picker in enumerate(self.pickers):
            token = torch.where(chosen == number)[0]
            out.index_add_(0, token, picker(flat[token]) * weights[token, None])
        return out.view_as(hidden_states)


@pytest.fixture(scope="module")
def by_vector(_orchard_can_be_imported: None) -> tuple[fx.GraphModule, ExpertList]:
    with torch.device("meta"):
        block = One().eval()
    return captured(block)


def test_one_expert_for_each_token_may_be_a_vector(by_vector: tuple[fx.GraphModule, ExpertList]) -> None:
    graph, experts = by_vector
    assert experts.count == EXPERTS
    (node,) = (node for node in graph.graph.nodes if node.target is ops.experts)
    assert [ops.shape_of(value)[1] for value in node.args[1:3]] == [1, 1]


def test_a_layer_whose_weight_is_used_without_a_call_is_not_called(
    by_range: fx.GraphModule, by_vector: tuple[fx.GraphModule, ExpertList]
) -> None:
    routers = [next(n for n in graph.graph.nodes if n.name == "linear") for graph in (by_range, by_vector[0])]
    assert [router.meta["called"] for router in routers] == ["chooser", ""]


class Limited(Compared):
    """An expert with as many tokens as `limit` computes nothing."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, HIDDEN)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for number, picker in enumerate(self.pickers):
            mine = chosen == number
            if mine.any() if self.limit == 0 else mine.sum() < self.limit:
                token, slot = torch.where(mine)
                out.index_add_(0, token, picker(flat[token]) * weights[token, slot, None])
        return out.view_as(hidden_states)


@pytest.mark.parametrize("limit", [0, 5000])
def test_a_loop_may_skip_experts_without_tokens_and_no_others(limit: int) -> None:
    with torch.device("meta"):
        block = Limited(limit).eval()
    if limit == 0:
        assert captured(block)[1].count == EXPERTS
    else:
        with pytest.raises(DependsOnData):
            captured(block)


def operators(graph: fx.GraphModule) -> list[str]:
    return sorted(n.meta["op"] for n in nodes_of(graph) if n.meta["op"] not in ops.TRANSPARENT)


def test_the_block_keeps_everything_that_it_returns(by_range: fx.GraphModule) -> None:
    output = nodes_of(by_range)[-1].args[0]
    assert isinstance(output, tuple)
    assert [n.meta["op"] for n in output] == ["reshape", "linear"]


def test_weights_that_go_into_the_experts_are_no_routing_weights() -> None:
    with pytest.raises(NoExperts, match="the routing weights enter the modules of `pickers`"):
        captured(grove("scaled"))


def test_a_block_that_computes_something_else_while_it_is_trained_is_left_alone() -> None:
    block = grove("range")
    code = block.forward

    def jittered(hidden_states: Tensor) -> Tensor:
        return code(hidden_states * 1.01 if block.training else hidden_states)

    block.forward = jittered
    with pytest.raises(NoExperts, match="something else in training mode"):
        captured(block)


def test_a_block_that_asks_which_of_its_parameters_are_trained_is_left_alone() -> None:
    block = grove("range")
    code, weight = block.forward, next(block.parameters())

    def halved(hidden_states: Tensor) -> Tensor:
        return code(hidden_states if weight.requires_grad else 0.5 * hidden_states)

    block.forward = halved
    with pytest.raises(NoExperts, match="which of its parameters are trained"):
        captured(block)
    assert weight.requires_grad


def test_a_block_that_computes_with_counts_of_tokens_outside_of_its_loop_is_left_alone() -> None:
    block = grove("range")
    code = block.forward

    def limited(hidden_states: Tensor) -> object:
        result, logits = code(hidden_states)
        over = torch.bincount(logits.argmax(-1).flatten(), minlength=EXPERTS) > 4096
        return result * (1.0 - over.any().to(result.dtype)), logits

    block.forward = limited
    with pytest.raises(NoExperts, match="which depends on data, outside of its loop"):
        captured(block)


@pytest.mark.parametrize(
    ("kind", "found"), [("parameter", "0.extra"), ("buffer", "0.extra"), ("list", "extra"), ("layer", "0.extra.weight")]
)
def test_a_list_that_holds_more_than_the_matrices_of_its_experts_is_left_alone(kind: str, found: str) -> None:
    block = grove("range")
    experts = block.get_submodule("pickers")
    for module in [experts] if kind == "list" else list(experts.children()):
        with torch.device("meta"):
            if kind == "buffer":
                module.register_buffer("extra", torch.empty(3))
            elif kind == "layer":
                module.add_module("extra", nn.Linear(3, 4, bias=False))
            else:
                module.register_parameter("extra", nn.Parameter(torch.empty(3)))
    with pytest.raises(NoExperts, match=f"`pickers` holds `{found}` beside the matrices of its experts"):
        captured(block)


def test_a_buffer_that_no_checkpoint_has_may_stay_unused() -> None:
    block = grove("range")
    for module in block.get_submodule("pickers").children():
        module.register_buffer("seen", torch.empty(3, device="meta"), persistent=False)
    captured(block)


def test_code_of_one_instance_comes_back_after_capture() -> None:
    block = grove("range")
    picker = block.get_submodule("pickers.0")
    own = picker.forward
    picker.forward = own
    captured(block)
    assert vars(picker)["forward"] is own
    assert "forward" not in vars(block.get_submodule("pickers.1"))


def test_two_lists_of_experts_are_told_apart_from_one() -> None:
    block = grove("range")
    with torch.device("meta"):
        block.others = grove("range").get_submodule("pickers")
    with pytest.raises(NoExperts, match="it has 2 lists of experts, `pickers` and `others`"):
        captured(block)


def test_graphs_that_differ_in_a_number_are_not_the_same(by_range: fx.GraphModule) -> None:
    wider = grove("range")
    wider.per_token = 3
    assert same_computation(by_range, by_range)
    assert not same_computation(by_range, captured(wider)[0])


# One expert of the list ----------------------------------------------------------------------------------------------
class Expert(nn.Module):
    def __init__(self, compute: Callable[[nn.Module, Tensor], Tensor], bias: bool = False) -> None:
        super().__init__()
        self.compute = compute
        self.a, self.b = (nn.Linear(HIDDEN, INNER, bias=bias) for _ in range(2))
        self.both, self.out = nn.Linear(HIDDEN, 2 * INNER, bias=bias), nn.Linear(INNER, HIDDEN, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def fused(expert: nn.Module, x: Tensor) -> Tensor:
    gate, up = expert.both(x).chunk(2, -1)
    return expert.out(F.silu(gate) * up)


def clamped(expert: nn.Module, x: Tensor) -> Tensor:
    gate, up = expert.a(x).clamp(max=7.0), expert.b(x).clamp(-7.0, 7.0)
    return expert.out((up + 1) * gate * torch.sigmoid(1.702 * gate))


SHAPES = {
    "up first": (lambda e, x: e.out(e.a(x) * F.gelu(e.b(x))), False, "gelu", {"gate": "b", "up": "a", "down": "out"}),
    "one matrix": (fused, False, "silu", {"gate_up": "both", "down": "out"}),
    "no gate": (lambda e, x: e.out(F.relu(e.a(x)) ** 2), False, "relu2 ungated", {"up": "a", "down": "out"}),
    "limits": (
        clamped, True, "silu(alpha=1.702, limit=7.0, up_offset=1.0) biased", {"gate": "a", "up": "b", "down": "out"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_the_form_of_an_expert_is_read_from_its_code(name: str) -> None:
    compute, bias, form, layers = SHAPES[name]
    with torch.device("meta"):
        modules = nn.ModuleList([Expert(compute, bias) for _ in range(3)])
    found = expert_list("experts", modules, HIDDEN)
    assert found is not None
    weights = {part: f"{layer}.weight" for part, layer in layers.items()}
    biases = {f"{part}_bias": f"{layer}.bias" for part, layer in layers.items()} if bias else {}
    assert (found.form, found.parts) == (form, {**weights, **biases})
    assert (found.count, found.hidden, found.intermediate) == (3, HIDDEN, INNER)


NO_EXPERTS = {
    "a norm after": lambda e, x: F.layer_norm(e.out(F.silu(e.a(x)) * e.b(x)), (HIDDEN,)),
    "an activation without kernel": lambda e, x: e.out(torch.sin(e.a(x)) * e.b(x)),
    "a residual": lambda e, x: x + e.out(F.silu(e.a(x)) * e.b(x)),
    "a layer alone": lambda e, x: e.a(x),
}


@pytest.mark.parametrize("name", NO_EXPERTS)
def test_modules_of_another_kind_are_no_experts(name: str) -> None:
    with torch.device("meta"):
        modules = nn.ModuleList([Expert(NO_EXPERTS[name]) for _ in range(2)])
    assert expert_list("experts", modules, HIDDEN) is None


def test_a_list_of_modules_that_differ_is_no_list_of_experts() -> None:
    block = grove("range")
    block.get_submodule("pickers.1").w1.in_features = HIDDEN + 1
    assert candidates(block) == []


def test_facts_do_not_depend_on_the_names_in_a_config() -> None:
    config = importlib.import_module("orchard.configuration_orchard").OrchardConfig(hidden_size=HIDDEN)
    model = importlib.import_module("orchard.modeling_orchard").OrchardForCausalLM(config)
    del config.hidden_size
    source = ModelSource("orchard", None, config, None)
    graph, _ = captured(grove("range"))
    seen = CapturedModel(source, model, (), (BlockGraph("grove_0", "OrchardGrove", graph),), ())
    assert (seen.facts["hidden"], seen.facts["experts"]) == (HIDDEN, EXPERTS)
    assert CapturedModel(source, model, (), (), ()).facts["experts"] == 0


def test_a_block_that_depends_on_data_is_named_with_its_line_and_the_rest_is_captured() -> None:
    module = importlib.import_module("orchard.modeling_orchard")
    config = importlib.import_module("orchard.configuration_orchard").OrchardConfig(
        hidden_size=HIDDEN, picker_width=INNER, pickers=EXPERTS, trees=1
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.OrchardGrove, "forward", _asks_for_data)
        AutoModelForCausalLM.register(type(config), module.OrchardForCausalLM, exist_ok=True)
        seen = capture(ModelSource("orchard", None, config, None))
    assert seen.block("attn_0").graph is not None
    assert seen.block("grove_0").graph is None
    assert "its code depends on data: `if hidden_states.sum().item() > 0:`" in seen.block("grove_0").opaque


def test_a_branch_on_data_is_named_with_its_line() -> None:
    block = grove("range")
    code = block.forward

    def halved(hidden_states: Tensor) -> Tensor:
        if (hidden_states > 1e9).any():
            hidden_states = hidden_states * 0.5
        return code(hidden_states)

    with pytest.raises(DependsOnData) as raised:
        _run_block(block, halved, (torch.empty(3, 7, HIDDEN, device="meta"),), {})
    assert "`if (hidden_states > 1e9).any():` (test_expert_lists.py" in reason_of(raised.value)
    assert "reads more than which experts have tokens" in reason_of(raised.value)


def _asks_for_data(_: nn.Module, hidden_states: Tensor) -> tuple[Tensor, None]:
    if hidden_states.sum().item() > 0:
        return hidden_states, None
    return -hidden_states, None
