"""Attention operators of a compiled model: latent attention on the compressed cache."""
