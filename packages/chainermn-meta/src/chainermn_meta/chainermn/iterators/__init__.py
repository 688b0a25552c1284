"""Iterators whose batches go to several ranks: to come."""

__all__: list[str] = []
