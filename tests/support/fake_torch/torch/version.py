"""What preflight reads instead of importing torch."""

__version__ = "0+fake"
cuda: str | None = None
hip: str | None = None
