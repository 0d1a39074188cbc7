"""Side effects of a call: attributes, lists, counters, changes of its input, gradients."""

from __future__ import annotations

from invented.family import Family

FAMILIES = (
    Family(
        "aux_attribute",
        "self.balance_loss = (share",
        "self.balance_loss = 0.0 * (share",
        expected="keeps a result as its attribute",
        near="keeps a result as its attribute",
    ),
    Family("aux_global", "Z_LOSSES.append(torch", "_ = (torch", expected="it changes `modeling_invented.Z_LOSSES`"),
    Family("input_changed", "hidden_states.mul_(0.5)", "hidden_states = hidden_states * 0.5"),
    Family("loss_ledger", "if self.training:", "if not self.training:"),
    Family(
        "stats_object",
        "        self.stats.calls += 1\n        self.stats.tokens.append(hidden_states.shape[1])\n",
        "",
        expected="it changes `stats.",
    ),
    Family(
        "config_counter",
        '        self.config.calls = getattr(self.config, "calls", 0) + 1\n        type(self).calls += 1\n',
        "",
        expected="it changes `",
    ),
)
