"""`ktc bench moe`: the routed experts of one layer beside their peers, in one process and in interleaved rounds.

`options` makes a `Request` of what was asked, `run` measures it into a `Report`, `plot` draws one. A figure is a median
of rounds in which every candidate runs once and the machine's two limits are measured between them; nothing is compared
across runs.
"""
