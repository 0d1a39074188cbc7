"""Load the tokenizer in the folder of a compiled model or of an adapter, without running code of the folder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.regular_files import read_regular, require_regular
from ktc.model.hf.foreign_errors import first_line

_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_PANIC = "PanicException"  # of libraries in Rust, for an internal fault; it does not derive from `Exception`


def read_tokenizer(folder: Path, code: str, **settings: Any) -> Any:
    """Return the tokenizer as transformers reads it, with its `settings`. Raises InputRefused with `code`."""
    from transformers import AutoTokenizer

    try:
        require_regular(folder, _FILES)
        return cast("Any", AutoTokenizer).from_pretrained(str(folder), **settings)
    except BaseException as error:  # the tokenizers library raises plain `Exception` on an invalid file, or panics
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        message = f"`{folder}` has no tokenizer that can be read: {first_line(error)}"
        raise InputRefused(Diagnostic(code, message, hint=_remedy(folder))) from error


def _remedy(folder: Path) -> str:
    config = folder / "tokenizer_config.json"
    with suppress(OSError):
        if b'"auto_map"' in read_regular(config):
            return f"`{config.name}` names code for the tokenizer, which ktc does not run"
    state = "are not all valid" if any(folder.glob("*token*")) else "are not there"
    return f"the tokenizer's files {state}: copy those of the original"
