"""The files that OUT copies from the checkpoint: the tokenizer, chat template and generation settings, as data alone.

In: the checkpoint's folder. Out: copies in OUT, and a warning that names the omissions: code, and references to code,
which `trust_remote_code=True` would run for OUT.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from ktc.diagnostics import Diagnostic
from ktc.foundation.decode import read_json
from ktc.foundation.regular_files import read_regular

_NAMES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "*processor_config.json",
    "generation_config.json",
)
_DATA = frozenset({".json", ".txt", ".jinja", ".model", ".tiktoken", ".vocab", ".bpe"})
_CODE_REFERENCES = ("auto_map", "custom_pipelines")  # keys under which transformers looks for code


def copy_data_files(checkpoint: Path, folder: Path) -> tuple[Diagnostic, ...]:
    """Copy the files of data. Return a warning (I146) if code was left out."""
    left: list[str] = []
    for path in _candidates(checkpoint):
        if path.suffix not in _DATA:
            left.append(f"`{path.name}`")
        elif path.suffix == ".json":
            left += _copy_json(path, folder / path.name)
        else:
            shutil.copyfile(path, folder / path.name)
    if not left:
        return ()
    message = f"OUT takes no code from the checkpoint; left out: {', '.join(left)}"
    hint = "if the tokenizer needs that code, load it from the original folder"
    return (Diagnostic("I146", message, hint=hint, severity="warning"),)


def without_code_references(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of transformers without the keys that name code to import."""
    return {key: value for key, value in content.items() if key not in _CODE_REFERENCES}


def _candidates(checkpoint: Path) -> Iterator[Path]:
    paths = {path for pattern in (*_NAMES, "tokenization_*") for path in checkpoint.glob(pattern) if path.is_file()}
    return iter(sorted(paths))


def _copy_json(path: Path, target: Path) -> list[str]:
    """Copy a JSON file unchanged, or without its references to code. Return a list of the omissions."""
    text = read_regular(path).decode(errors="replace")
    if not any(key in text for key in _CODE_REFERENCES) and "\\u" not in text:
        shutil.copyfile(path, target)
        return []
    try:
        content: object = read_json(text)
    except ValueError:  # left out, because another parser might accept it
        return [f"`{path.name}`, which is not JSON"]
    references = [key for key in _CODE_REFERENCES if isinstance(content, dict) and key in content]
    if not references:
        shutil.copyfile(path, target)
        return []
    kept = without_code_references(cast("dict[str, Any]", content))
    target.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    return [f"`{key}` of `{path.name}`" for key in references]
