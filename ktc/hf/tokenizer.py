"""The tokenizer in the folder of a compiled model or of an adapter, without any code of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from ktc.diagnostics import Diagnostic, InputRefused


def read_tokenizer(folder: Path, code: str, **settings: Any) -> Any:
    """As transformers reads it, with its `settings`. Raises InputRefused by `code` where there is none that it can."""
    from transformers import AutoTokenizer

    try:
        return cast("Any", AutoTokenizer).from_pretrained(str(folder), **settings)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        message = f"`{folder}` has no tokenizer that can be read: {reason}"
        hint = "put the original's tokenizer files there; a tokenizer with code of its own is not run"
        raise InputRefused(Diagnostic(code, message, hint=hint)) from error
