"""A compiled model ready for generation: loaded once, with its tokenizer and optionally an adapter.

Input: the folder OUT and the user's choices. Output: a frozen `LanguageModel`. Refused before loading: a model without
a tokenizer, or with the tokenizer of another model (G701), and an invalid adapter (A6xx).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.hf.processor import with_tokenizer
from ktc.model.hf.tokenizer import read_tokenizer
from ktc.model.loading.images import open_processor

if TYPE_CHECKING:
    import torch

_TOKENIZER = "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """`model` is the compiled model, or a `PeftModel` around it; `max_length` the model's maximum sequence length.

    `processor` is the checkpoint's, for images; None for text alone.
    """

    model: Any
    tokenizer: Any
    name: str
    adapter: str
    max_length: int | None
    processor: Any = None

    @property
    def device(self) -> torch.device:
        """The device of its input."""
        return self.model.get_input_embeddings().weight.device

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @property
    def streams(self) -> bool:
        """Whether its tokenizer is a fast one: the server of transformers streams with no other."""
        return bool(getattr(self.tokenizer, "is_fast", False))

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end an answer: those of the generation config, otherwise the tokenizer's."""
        ids = self.model.generation_config.eos_token_id
        if ids is None:
            ids = self.tokenizer.eos_token_id
        return frozenset(() if ids is None else [ids] if isinstance(ids, int) else ids)

    @property
    def pad_id(self) -> int:
        """The padding token of shorter rows; it is masked, so any token works if the tokenizer has none."""
        token = self.tokenizer.pad_token_id
        return int(token) if token is not None else min(self.eos_ids, default=0)


def open_language_model(
    out: Path,
    *,
    adapter: Path | None = None,
    reference: bool = False,
    weights: Path | None = None,
    trust_remote_code: bool = False,
    name: str = "",
    with_images: bool = False,
) -> LanguageModel:
    """Return the compiled model in `out`, in evaluation mode. Raises as `ktc.load` and `attach` do, and G701.

    `name` is its name for people and clients, by default that of the folder. `with_images` reads its processor before
    the weights, and raises as `open_processor` does.

    The tokenizer is the adapter's if its folder has one (trainers save it there, with the template of the training),
    otherwise that of OUT.
    """
    from ktc.adapters.adapter import attach, read_adapter
    from ktc.model.loading.load import load
    from ktc.model.manifest.manifest import read_manifest

    read_manifest(out)
    if adapter is not None:
        read_adapter(adapter)
    folder = adapter if adapter is not None and (adapter / _TOKENIZER).is_file() else out
    tokenizer = read_tokenizer(folder, "G701", padding_side="left")
    processor = open_processor(out, trusted=trust_remote_code) if with_images else None
    processor = processor if folder == out else with_tokenizer(processor, tokenizer)
    model: Any = load(out, weights=weights, reference=reference, trust_remote_code=trust_remote_code)
    _require_rows(tokenizer, model, out.name)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if adapter is not None:
        model = attach(model, adapter, alone=True)
    model.eval()
    limit = longest if isinstance(longest, int) and longest > 0 else None
    name = name or out.resolve().name
    return LanguageModel(model, tokenizer, name, "" if adapter is None else str(adapter), limit, processor)


def read_adapter_tokenizer(adapter: Path, opened: LanguageModel) -> Any:
    """Return the tokenizer in the folder of an adapter, otherwise the model's. Raises InputRefused (G701)."""
    if not (adapter / _TOKENIZER).is_file():
        return opened.tokenizer
    tokenizer = read_tokenizer(adapter, "G701", padding_side="left")
    _require_rows(tokenizer, opened.model, opened.name)
    return tokenizer


def _require_rows(tokenizer: Any, model: Any, name: str) -> None:
    rows = int(model.get_input_embeddings().weight.shape[0])
    if len(tokenizer) > rows:
        message = f"the tokenizer has {len(tokenizer)} tokens, `{name}` has embeddings for {rows}"
        raise InputRefused(Diagnostic("G701", message, hint="use the tokenizer that the model was trained with"))


@contextmanager
def without_adapter(opened: LanguageModel) -> Generator[None]:
    """Disable the adapter inside the context, and put back the weights that it changed; without one nothing changes."""
    if not opened.adapter:
        yield
        return
    from ktc.adapters.own_weights import as_before

    with opened.model.disable_adapter(), as_before(opened.model.get_base_model()):
        yield
