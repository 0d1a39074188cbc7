"""The arguments of a recipe's experts that no program streams, rounds or trains."""

from __future__ import annotations

from typing import Any, Final

PLAIN_EXPERTS: Final[dict[str, Any]] = {
    "prefill": [], "prefill_tokens": 1, "stream_buffer": 1, "resident": False, "kept": None, "bus_share": 0.0,
    "fixed_split": False, "divided": 0, "crowded": 1.0, "grid": None, "masters": None,
    "merged": False,
}  # fmt: skip
