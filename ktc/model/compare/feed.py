"""Inputs of both sides of a comparison: tokens of a text or random ones, and the same random state.

Refused: a file that cannot be read or is empty (N603), a text without a tokenizer (N603).
"""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.text_files import read_text
from ktc.model.compare.shown import Shown
from ktc.model.hf.tokenizer import read_tokenizer

_MOST_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Tokens:
    """One sequence (1, T) int64. `source` names its origin; `pieces` has the text of each token, or nothing.

    It begins with the question `shown`, if there is one.
    """

    ids: Tensor
    source: str
    pieces: tuple[str, ...]
    shown: Shown | None = None

    def piece(self, position: int) -> str:
        """Return the text of a token, "" where it is unknown."""
        return self.pieces[position] if self.pieces else ""

    def after(self, shown: Shown) -> Tokens:
        """Return the tokens after a question that shows images."""
        source = f"{self.source}, after {shown.length} that show {shown.words}"
        pieces = (*[""] * shown.length, *self.pieces) if self.pieces else ()
        return Tokens(shown.before(self.ids), source, pieces, shown)


def choose_tokens(folder: Path, vocabulary: int, text: Path | None, count: int, seed: int) -> Tokens:
    """Return at most `count` tokens: the first of `text`, or random ones of the vocabulary.

    `folder` is a compiled model, whose tokenizer splits the text.

    Raises:
        InputRefused: N603.
    """
    if text is None:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocabulary, (1, count), generator=generator)
        return Tokens(ids, f"random tokens, seed {seed}", ())
    content = read_text(text, unreadable="N603", not_utf8="N603", most_bytes=_MOST_BYTES)
    tokenizer = read_tokenizer(folder, "N603")
    ids = [int(number) for number in tokenizer(content, verbose=False)["input_ids"][:count]]
    if not ids:
        raise InputRefused(Diagnostic("N603", f"`{text}` has no tokens", hint="give a file with some text"))
    pieces = tuple(str(tokenizer.decode([number])) for number in ids)
    return Tokens(torch.tensor([ids]), f"{text.name}, its first {len(ids)} tokens", pieces)


@contextmanager
def same_random_numbers(seed: int) -> Generator[None]:
    """Draw the random numbers of `seed` inside, from PyTorch, Python and NumPy. Those after it do not change."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
