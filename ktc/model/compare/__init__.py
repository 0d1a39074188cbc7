"""Comparisons with stock: the inputs, the values of two sides, the baseline, and the verdict.

`ktc prove`, `ktc consistency`, the proof of a compilation and the census are its users. It knows no stage of the
compiler.
"""
