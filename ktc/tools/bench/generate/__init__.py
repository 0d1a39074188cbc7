"""`ktc bench generate`: the steps of `generate` at a model's real sizes, with random weights.

In: the options. Out: a `Report` with a row per way to compute, batch and context, and the ways that were left out.
"""
