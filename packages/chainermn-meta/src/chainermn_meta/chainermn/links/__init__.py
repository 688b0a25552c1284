"""Links that span ranks: to come."""

__all__: list[str] = []
