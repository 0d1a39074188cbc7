"""Code that runs in one mode only: training or evaluation."""

from __future__ import annotations

from invented.family import Family

FAMILIES = (
    Family(
        "train_jitter",
        "self.training and self.jitter > 0",
        "self.training and self.jitter > 1",
        expected="it computes something else in training mode",
        settings={"router_jitter_noise": 0.1},
    ),
    Family(
        "train_expert_dropout",
        "nn.Dropout(0.1)",
        "nn.Dropout(0.0)",
        expected="its experts compute something else in training mode",
    ),
    Family(
        "frozen_router",
        "not self.gate.weight.requires_grad",
        "self.gate.bias is not None",
        expected="depends on which of its parameters are trained",
    ),
    Family("noisy_top_k", "F.softplus(self.spread(x))", "0.0 * F.softplus(self.spread(x))"),
    Family("train_bias_update", "self.bias += 0.01", "self.bias += 0.0"),
    Family("aux_scaler", "0.01 * torch.ones_like(loss)", "torch.zeros_like(loss)"),
    Family("train_override", "3 if mode else 2", "2 if mode else 2", expected="computes something else than stock"),
)
