"""Trainers of a compiled model."""
