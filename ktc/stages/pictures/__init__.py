"""Dumps of graphs and their views: text, diff, DOT, SVG and HTML."""
