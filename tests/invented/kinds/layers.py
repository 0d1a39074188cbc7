"""Settings that differ from layer to layer."""

from __future__ import annotations

from invented.family import Family

FAMILIES = (
    Family(
        "layer_limit_list",
        "self.config.limits[self.layer_idx]",
        "self.config.limits[0]",
        settings={"num_hidden_layers": 4, "limits": [2.0, 5.0, 2.0, 3.0]},
    ),
    Family("layer_parity", "if self.layer_idx % 2:", "if self.layer_idx % 4 == 3:", settings={"num_hidden_layers": 4}),
    Family(
        "derived_by_layer",
        "self.levels[self.number]",
        "self.levels[1]",
        expected="computes something around its experts",
        near="computes something around its experts",
        settings={"num_hidden_layers": 4, "levels": [1.0, 0.5, 1.0, 2.0]},
    ),
    Family("top_k_by_layer_list", "2 + layer_idx % 2", "2"),
)
