"""Weights of a compiled model: read from the checkpoint or the packed store, placed on devices, counted."""
