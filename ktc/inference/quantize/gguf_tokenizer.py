"""The tokenizer of a checkpoint as settings of a GGUF file, where llama.cpp has its kind.

In: the folder with tokenizer.json. Out: settings in a writer of the `gguf` package, and the kind in words. There are
two kinds: byte-level BPE (`gpt2`), whose splitting of text llama.cpp knows by the name of a family, and SentencePiece
(`llama`). A file without a tokenizer is complete for programs that send tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from ktc.foundation.regular_files import read_regular

NONE: Final = "none"
_BPE, _SENTENCE_PIECE = "gpt2", "llama"
# The splitting of text before BPE, by the model's type. The file shows whether a tokenizer splits as GPT-2 does.
_SPLITTING: Final[Mapping[str, str]] = {
    "qwen2_moe": "qwen2",
    "qwen3_moe": "qwen2",
    "qwen3_vl_moe": "qwen2",
    "olmoe": "olmo",
    "deepseek_v2": "deepseek-llm",
    "deepseek_v3": "deepseek-v3",
    "gpt_oss": "gpt-4o",
}
_AS_GPT2: Final = "gpt-2"
_BYTE_TOKEN: Final = re.compile(r"<0x..>")
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 3, 4, 5, 6


def add_tokenizer(writer: Any, folder: Path, model_type: str, size: int) -> str:
    """Add the tokenizer in `folder` for a model of `size` tokens, and return its kind; `NONE` if there is none."""
    path = folder / "tokenizer.json"
    content: dict[str, Any] = json.loads(read_regular(path).decode()) if path.is_file() else {}
    kind, splitting = _kind(content, model_type)
    if kind == NONE:
        writer.add_tokenizer_model(NONE)
        return NONE
    writer.add_tokenizer_model(kind)
    tokens, types = _tokens(content, size)
    if kind == _BPE:
        writer.add_tokenizer_pre(splitting)
    else:
        writer.add_tokenizer_pre("default")
        scores = [-float(number) for number in range(len(tokens))]  # merges come in order of their pieces' numbers
        writer.add_token_scores(scores)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    import gguf

    special = cast("Any", gguf).SpecialVocab(folder, load_merges=kind == _BPE, n_vocab=size)
    special.add_to_gguf(writer)
    return kind


def _kind(content: Mapping[str, Any], model_type: str) -> tuple[str, str]:
    model: Mapping[str, Any] = content.get("model") or {}
    if model.get("type") != "BPE":
        return NONE, ""
    if model.get("byte_fallback"):
        return _SENTENCE_PIECE, ""
    first: Mapping[str, Any] = content.get("pre_tokenizer") or {}
    if first.get("type") == "ByteLevel" and first.get("use_regex", True):
        return _BPE, _SPLITTING[model_type] if model_type == "olmoe" else _AS_GPT2
    splitting = _SPLITTING.get(model_type)
    return (_BPE, splitting) if splitting else (NONE, "")


def _tokens(content: Mapping[str, Any], size: int) -> tuple[list[bytes], list[int]]:
    """Return texts and types of all tokens of the model; numbers beyond the tokenizer's are unused."""
    vocabulary: dict[str, int] = content["model"]["vocab"]
    by_number = {
        number: (text, _BYTE if _BYTE_TOKEN.fullmatch(text) else _NORMAL) for text, number in vocabulary.items()
    }
    for token in content.get("added_tokens") or ():
        by_number[token["id"]] = (token["content"], _CONTROL if token.get("special") else _USER_DEFINED)
    tokens = [by_number.get(number, (f"[PAD{number}]", _UNUSED)) for number in range(size)]
    return [text.encode() for text, _ in tokens], [kind for _, kind in tokens]
