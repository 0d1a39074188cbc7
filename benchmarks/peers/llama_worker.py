"""llama.cpp as a program that answers JSON lines: `python -I llama_worker.py` of an environment with llama-cpp-python.

This file imports llama_cpp, numpy and nothing of ktc. A request names a method of `Worker` and its arguments;
`{"error": ...}` answers what failed. Settings that are not named here are llama.cpp's defaults. Sequences have caches
of their own (`kv_unified` is off), as those of ktc have.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

llama_cpp: Any = importlib.import_module("llama_cpp")  # it is of another environment than ktc's

_BATCH = 512
_PADDING = 256  # a cache's length is a multiple of it
_FP32, _NO_FLASH_ATTENTION = 0, 0  # numbers of llama.cpp's enumerations


class Worker:
    """One model, and one context at a time."""

    def __init__(self) -> None:
        self._context: Any = None
        self._model: Any = None
        self._sequences = 0

    def open(self, file: str, threads: int) -> dict[str, Any]:
        """Load a GGUF file. Says which llama.cpp this is, and the instructions that it was built for."""
        self._quiet = llama_cpp.llama_log_callback(_say_nothing)  # llama.cpp keeps its address
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._threads = threads
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), parameters)
        if not self._model:
            raise RuntimeError("llama.cpp cannot load the file")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        built = llama_cpp.llama_print_system_info().decode()
        return {"version": llama_cpp.__version__, "built": built}

    def prepare(self, sequences: int, context: int, room: int, exact: bool = False) -> dict[str, Any]:
        """Make a context whose `sequences` sequences have `context` tokens each, with room for `room` more.

        `exact`: keys and values in fp32, and attention without the kernel that rounds them.
        """
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        self._sequences, self._length = sequences, context
        length = -(-(context + room) // _PADDING) * _PADDING
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = length * sequences, sequences
        parameters.n_batch, parameters.n_ubatch = max(_BATCH, room), _BATCH
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.kv_unified = False
        if exact:
            parameters.type_k = parameters.type_v = _FP32
            parameters.flash_attn_type = _NO_FLASH_ATTENTION
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError(f"llama.cpp has no room for {sequences} sequences of {length} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        for first in range(0, context, _BATCH):
            count = min(_BATCH, context - first)
            self._decode([(at % self._vocabulary, first + at, 0) for at in range(count)])
        for sequence in range(1, sequences if context else 1):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
        return {}

    def decode(self, steps: int) -> dict[str, Any]:
        """Add a token to every sequence, `steps` times. Returns the seconds, and forgets the tokens."""
        rows = [
            [(11 + sequence, self._length + step, sequence) for sequence in range(self._sequences)]
            for step in range(steps)
        ]
        cpu, wall = time.process_time(), time.perf_counter()
        for row in rows:
            self._decode(row, all_logits=True)
        spent = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
        for sequence in range(self._sequences):
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, self._length, -1)
        return spent

    def prefill(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Read a prompt, in pieces as llama.cpp cuts it, and compute the logits of its last token."""
        llama_cpp.llama_memory_clear(self._memory, True)
        rows = [(token, at, 0) for at, token in enumerate(tokens)]
        cpu, wall = time.process_time(), time.perf_counter()
        self._decode(rows)
        return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}

    def logits(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the logits after a prompt."""
        self.prefill(tokens)
        found = llama_cpp.llama_get_logits_ith(self._context, -1)
        return {"logits": np.ctypeslib.as_array(found, (self._vocabulary,)).tolist()}

    def _decode(self, rows: Sequence[tuple[int, int, int]], *, all_logits: bool = False) -> None:
        """Compute tokens at positions of sequences, in one call."""
        batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for at, (token, position, sequence) in enumerate(rows):
            batch.token[at], batch.pos[at] = token, position
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            batch.logits[at] = all_logits or at == len(rows) - 1
        status = llama_cpp.llama_decode(self._context, batch)
        llama_cpp.llama_synchronize(self._context)
        llama_cpp.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")


def _say_nothing(level: int, text: bytes, data: int) -> None:
    """Replace llama.cpp's log."""


def serve() -> None:
    """Answer requests until stdin ends. The library's stdout goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = Worker()
    known: dict[str, Callable[..., dict[str, Any]]] = {
        "open": worker.open, "prepare": worker.prepare, "decode": worker.decode, "prefill": worker.prefill,
        "logits": worker.logits,
    }  # fmt: skip
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = known[request["do"]](**request["with"])
        except (RuntimeError, ValueError, TypeError, AttributeError, OSError, MemoryError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
