"""Values beyond the largest number of their dtype, and code that looks for them."""

from __future__ import annotations

from invented.family import Family

FAMILIES = (
    Family("cleaned_results", ".nan_to_num()", ".nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=-torch.inf)"),
)
