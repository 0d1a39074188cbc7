"""Checkpoints whose weights are quantised, written from those that are not.

`scheme` names the formats, `selection` decides what is quantised, `shards` writes files, `checkpoint` does it all.
"""
