"""The manifest of an OUT, its assumptions about stock code, and the guard against later changes."""
