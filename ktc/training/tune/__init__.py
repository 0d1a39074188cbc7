"""`ktc train`: settings, data, the run folder, the run and its page."""
