"""The peers of `ktc bench`: other implementations of the same work, outside of ktc's wheel.

`ktc.tools.bench.peers.peer` imports a module of this folder from a source checkout.
"""
