"""Values beyond the largest number of their dtype, and code that looks for them."""

from __future__ import annotations

from invented.family import Family

FAMILIES = (
    Family(
        "cleaned_results",
        ".nan_to_num()",
        "",
        expected="reads the values of their results",
    ),
    Family(
        "finite_results",
        "torch.where(torch.isfinite(y), y, torch.zeros_like(y))",
        "y",
        expected="its loop over experts computes `abs` too",
    ),
    Family("cleaned_gate", ".nan_to_num(nan=torch.nan)", "", expected="an activation that no kernel computes"),
    Family("cleaned_loop", "y.nan_to_num()", "y", expected="is not read as experts"),
    Family("cleaned_sum", ".nan_to_num()", ""),
    Family(
        "infinity_asked",
        "if torch.isinf(out).any():",
        "if False:",
        expected="its code depends on data",
    ),
)
