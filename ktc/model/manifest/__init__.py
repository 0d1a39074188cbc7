"""The manifest of an OUT, what it assumes about stock code, and the watch over later changes."""
