"""GPUlayer: one torchrun job across machines, over SSH.

Data flows one way, and each step has a file:
hosts -> placement -> plan -> fanout -> remote -> (supervisor, on the node) -> events -> outcome.
docs/architecture.md is the map.
"""

__version__ = "0.1.0"
