"""Weights at two places: layers with one bank of experts, an expert twice in a list; by name and by object."""

from __future__ import annotations

from invented.family import Family

_TIED = {"tie_word_embeddings": True}  # transformers ties nothing without it

_KEPT = "is also `model.layers."

FAMILIES = (
    Family(
        "tied_bank",
        "[1-9].mlp",
        "[2-9].mlp",
        expected=_KEPT,
        near="rewritten 1 of 3",
        settings=_TIED | {"num_hidden_layers": 3},
    ),
    Family(
        "tied_later_layers",
        "layers.2.mlp.experts.gate_up_proj",
        "layers.1.mlp.experts.gate_up_proj",
        expected="rewritten 2 of 4",
        near="rewritten 1 of 4",
        settings=_TIED | {"num_hidden_layers": 4},
    ),
    Family("one_expert_twice", "self.experts[2]", "self.experts[5]", expected=_KEPT),
    Family("tied_expert_of_list", "(0, 1)", "(0,)", expected=_KEPT, near="rewritten 1 of 2", settings=_TIED),
    Family("shared_gate", "mlp.gate = self.model.layers[0]", "mlp.other = self.model.layers[0]"),
    Family("lists_shared", "number % 2", "number", expected=_KEPT, settings={"num_hidden_layers": 4}),
)
