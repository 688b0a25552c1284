"""Communication that gradients travel back through: to come."""

__all__: list[str] = []
