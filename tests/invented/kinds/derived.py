"""Classes derived from an experts class."""

from __future__ import annotations

from invented.family import Family

FAMILIES = (
    Family(
        "derived_scaled",
        "self.scale = 1.7",
        "self.scale = 1.0",
        expected="computes something around its experts",
        near="computes something around its experts",
    ),
    Family(
        "derived_normalised",
        "return self.level(routed)",
        "return routed",
        expected="computes something around its experts",
        near="computes something around its experts",
    ),
    Family(
        "derived_residual",
        "return hidden_states + super()",
        "return super()",
        expected="computes something around its experts",
        near="computes something around its experts",
    ),
    Family(
        "derived_dropout",
        "training=self.training",
        "training=False",
        expected="computes something around its experts",
        near="computes something around its experts",
        settings={"resid_pdrop": 0.1},
    ),
    Family(
        "derived_noise",
        "if self.training:",
        "if False:",
        expected="computes something around its experts",
        near="computes something around its experts",
    ),
    Family("gate_of_its_own", "(up + 1)", "up", settings={"swiglu_limit": 4.0}),
    Family(
        "gate_added",
        "return opened * up + gate",
        "return opened * up",
        expected="has an activation that no kernel computes",
    ),
    Family(
        "derived_repeated",
        "rounds = 2",
        "rounds = 1",
        expected="computes something around its experts",
        near="computes something around its experts",
    ),
    Family(
        "derived_shifted",
        "(top_k_index + 1) % self.num_experts",
        "top_k_index % self.num_experts",
        expected="computes something around its experts",
        near="computes something around its experts",
    ),
    Family("hooked_experts", "output * 0.6", "output * 1.0", expected="hooks on", near="hooks on"),
    Family(
        "dtype_branch",
        "hidden_states.dtype != torch.float32",
        "hidden_states.dtype == torch.float64",
        expected="computes something around its experts",
        near="computes something around its experts",
    ),
    Family(
        "limit_parameter",
        "torch.minimum(gate, self.limit)",
        "torch.minimum(gate, gate)",
        expected="beside its matrices",
        near="beside its matrices",
    ),
    Family("interleaved_gate", "gate_up[..., ::2], gate_up[..., 1::2]", "gate_up.chunk(2, dim=-1)"),
    Family(
        "gate_dropout", "0.1, self.training", "0.0, self.training", expected="has an activation that no kernel computes"
    ),
    Family(
        "derived_clamped",
        ".clamp(-20.0, 20.0)",
        "",
        expected="computes something around its experts",
        near="computes something around its experts",
    ),
    Family(
        "derived_counted",
        "self.seen += F.one_hot(top_k_index, self.num_experts).sum((0, 1))",
        "self.seen += 0",
        expected="computes something around its experts",
        near="computes something around its experts",
    ),
    Family(
        "changed_after_load",
        "layer.mlp.level = 0.5",
        "layer.mlp.level = 1.0",
        expected="`from_pretrained` of its own",
        near="`from_pretrained` of its own",
    ),
)
