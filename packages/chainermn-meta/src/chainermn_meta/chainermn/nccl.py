"""NCCL: not bound yet, so that nothing travels between devices directly."""

__all__: list[str] = []

_available = False
