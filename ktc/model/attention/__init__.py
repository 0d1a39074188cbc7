"""Attention operators of a compiled model: latent, decode and sparse attention."""
