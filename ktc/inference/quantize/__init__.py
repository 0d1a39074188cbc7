"""Checkpoints in other forms, INT4 and GGUF, written from those that transformers saves.

`original` reads weights, with a merged adapter, and `expert_matrices` those of stacks. INT4: `scheme`, `selection`,
`shards` and `checkpoint`, which does it all. GGUF: `gguf_text`, `gguf_tensors`, `gguf_rows`, `gguf_settings`,
`gguf_tokenizer` and `gguf_model`.
"""
