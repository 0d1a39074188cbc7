"""A compiled model: its manifest, how it is loaded, packed, verified and placed."""
