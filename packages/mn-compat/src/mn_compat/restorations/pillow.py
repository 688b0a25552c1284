"""Pillow."""

from types import ModuleType


def restore_antialias(image: ModuleType) -> None:
    """Give ``PIL.Image`` its alias of the best filter for making pictures smaller."""
    if "ANTIALIAS" not in vars(image):
        image.ANTIALIAS = image.Resampling.LANCZOS  # type: ignore[attr-defined]
