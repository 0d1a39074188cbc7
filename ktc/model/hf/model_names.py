"""MODEL as a user names it, without an import of transformers: a folder, a hub id `owner/name`, or `tiny:NAME`.

In: a text. Out: nothing. Refused: neither of the three (I100), a folder without config.json (I102), a twin of a family
that transformers does not have (I110).
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from ktc.diagnostics import Diagnostic, InputRefused, suggest

TINY: Final = "tiny:"
# The settings specific to each twin; all others are the family's defaults, shrunk.
TWIN_SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "deepseek_v2": {
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {},
    "qwen3_moe": {"norm_topk_prob": True},
}
_MAPPING: Final = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"  # of transformers


def require_model(name: str) -> None:
    """Raise InputRefused (I100, I102, I110) for a name that is not a model; a hub id is not looked up."""
    if name.startswith(TINY):
        require_twin(name.removeprefix(TINY), causal_families())
    elif Path(name).is_dir():
        require_config(Path(name))
    elif not looks_like_hub_id(name):
        raise InputRefused(not_a_model(name))


def require_twin(name: str, families: frozenset[str] | None) -> None:
    """Raise InputRefused (I110) if transformers has no such family; `families` is None where they are not known."""
    if families is None or name in families:
        return
    hint = suggest(name, families) or f"write `tiny:` and a causal LM family, like {', '.join(TWIN_SETTINGS)}"
    raise InputRefused(Diagnostic("I110", f"no small model is called `{name}`", hint=hint))


def require_config(folder: Path) -> None:
    """Raise InputRefused (I102) for a folder without config.json."""
    if not (folder / "config.json").is_file():
        hint = "a model folder is the output of `save_pretrained`"
        if any(folder.glob("*.gguf")):
            hint = "put config.json and the tokenizer of the original next to the GGUF file"
        raise InputRefused(Diagnostic("I102", f"`{folder}` has no config.json", hint=hint))


def looks_like_hub_id(name: str) -> bool:
    """Return whether the name can be `owner/name`, and no folder has the name of the owner."""
    owner = Path(name.split("/")[0])
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not owner.exists()


def not_a_model(name: str) -> Diagnostic:
    """Return the message (I100) for a name that is neither a folder, nor a hub id, nor a twin."""
    hint = "give a folder with config.json, a hub id `owner/name`, or `tiny:NAME`"
    if name.endswith(".gguf") and Path(name).is_file():
        hint = "put config.json and the tokenizer of the original next to the file, and give their folder"
    elif name in TWIN_SETTINGS:
        hint = f"the small model of this family is `{TINY}{name}`"
    return Diagnostic("I100", f"MODEL `{name}` is not a folder", hint=hint)


@cache
def causal_families() -> frozenset[str] | None:
    """Return the causal LM families of the installed transformers, read from its source.

    None if the source has another form; the caller then asks transformers itself.
    """
    package = importlib.util.find_spec("transformers")
    folder = Path(package.origin).parent if package is not None and package.origin is not None else Path()
    try:
        tree = ast.parse((folder / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == _MAPPING for t in node.targets):
            return _first_words(node.value)
    return None


def _first_words(value: ast.expr) -> frozenset[str] | None:
    """Return the keys of `OrderedDict([("key", ...), ...])`, None for another expression."""
    if not (isinstance(value, ast.Call) and len(value.args) == 1 and isinstance(value.args[0], ast.List)):
        return None
    firsts = [pair.elts[0] for pair in value.args[0].elts if isinstance(pair, ast.Tuple) and pair.elts]
    words = frozenset(
        first.value for first in firsts if isinstance(first, ast.Constant) and isinstance(first.value, str)
    )
    return words if len(firsts) == len(value.args[0].elts) else None
