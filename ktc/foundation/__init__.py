"""The ground that all wings stand on: files, hosts, formats and instruction sets. It knows no model and no torch."""
