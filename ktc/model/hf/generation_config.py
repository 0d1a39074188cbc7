"""Read `generation_config.json` of a folder, whose values transformers does not check."""

from __future__ import annotations

from pathlib import Path

from transformers import GenerationConfig

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.decode import read_json
from ktc.foundation.regular_files import read_regular
from ktc.model.hf.foreign_errors import first_line

FILE = "generation_config.json"
_MOST_BYTES = 1 << 20


def read_generation_config(folder: Path) -> GenerationConfig:
    """Return the generation settings of `folder`. Raises InputRefused (L402)."""
    path = folder / FILE
    try:
        content: object = read_json(read_regular(path, _MOST_BYTES))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        return GenerationConfig.from_pretrained(folder)
    except Exception as error:  # transformers raises anything on an invalid value
        message = f"`{path}` cannot be used: {first_line(error) or type(error).__name__}"
        raise InputRefused(Diagnostic("L402", message, hint="copy it from the original model again")) from error
