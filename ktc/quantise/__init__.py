"""Checkpoints in other forms, INT4 and GGUF, written from those that transformers saves.

`scheme` names the formats, `selection` decides what is quantised, `shards` writes files, `checkpoint` does it all.
"""
