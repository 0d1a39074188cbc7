"""Mutants of everything that ktc reads from outside: each is refused with its place, or accepted and well-formed.

`kinds.py` lists what is mutated, `mutate.py` how, `fuzzing.py` judges and keeps the corpus; `found/` has findings.
"""
