"""Rows times matrices of experts on a GPU: grouped products, their steps, and the checks before the first use."""
