"""Invented models that are registered with transformers and need no folder: for tests of capture, match and proof."""
