"""`StockPasses`: the passes of one request as `generate` of transformers makes them.

In: the model, and the arguments that its own code has prepared for a prompt, pixels of images among them. Out: the
logits of the next token. The prompt is read in one pass. Positions of several axes, masks of image tokens and features
of images are the model's. Where it keeps positions between passes, they are put back before those of another request.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from ktc.inference.serving.private_api import OF_PROMPTS_ALONE, next_arguments

_KEPT: Final = "rope_deltas"  # how far positions behind images differ from the number of tokens


class StockPasses:
    """One sequence. `arguments` are those of `generate` after its preparations, its cache among them.

    Those by the names `pixels` are read with the prompt, and are released then.
    """

    def __init__(self, model: Any, arguments: Mapping[str, Any], num_prompt: int, pixels: Collection[str] = ()) -> None:
        self._model, self._arguments, self._pixels = model, dict(arguments), pixels
        self._num_prompt, self._num_read = num_prompt, 0
        self._keepers = [module for module in model.modules() if hasattr(module, _KEPT)]
        self._kept = [getattr(module, _KEPT) for module in self._keepers]

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Read what is new of all tokens so far; return the logits of the next, (1, V) fp32."""
        assert self._num_read < len(tokens), "a pass has a new token"
        outputs: Any = None
        with torch.no_grad(), self._positions():
            while self._num_read < len(tokens):
                outputs = self._read(tokens)
        return outputs.logits[:, -1].float()

    def _read(self, tokens: Sequence[int]) -> Any:
        """Read the prompt, or one token after it."""
        is_first = not self._num_read
        stop = self._num_prompt if is_first else self._num_read + 1
        device = self._model.get_input_embeddings().weight.device
        ids = torch.tensor([tokens[:stop]], device=device)
        given: dict[str, Any] = self._model.prepare_inputs_for_generation(
            ids, next_sequence_length=stop - self._num_read, is_first_iteration=is_first, **self._arguments
        )
        outputs = self._model(**given, return_dict=True)
        if is_first:
            self._arguments = _released(self._arguments, self._pixels)
        self._arguments = next_arguments(self._model, outputs, self._arguments)
        self._num_read = stop
        return outputs

    @contextmanager
    def _positions(self) -> Generator[None]:
        """Let the model have the positions of this request inside the context."""
        for module, value in zip(self._keepers, self._kept, strict=True):
            setattr(module, _KEPT, value)
        yield
        self._kept = [getattr(module, _KEPT) for module in self._keepers]


def _released(arguments: Mapping[str, Any], pixels: Collection[str]) -> dict[str, Any]:
    """Return arguments without pixels and what towers made of them, which no pass after the prompt's reads.

    Other whole numbers stay, such as grids that positions are found by.
    """
    large = {name for name in pixels if isinstance(value := arguments.get(name), Tensor) and value.is_floating_point()}
    return {name: value for name, value in arguments.items() if name not in large | OF_PROMPTS_ALONE}
