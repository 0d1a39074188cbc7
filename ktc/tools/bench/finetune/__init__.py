"""`ktc bench finetune`: optimizer steps of LoRA at a model's real sizes, with random weights or its own.

In: the options. Out: a `Report` with a row per way to compute, and the reasons for those that were left out.
"""
