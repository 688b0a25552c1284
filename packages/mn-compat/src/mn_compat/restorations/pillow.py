"""Pillow."""

from types import ModuleType


def restore_antialias(image: ModuleType) -> None:
    """Restore the alias in ``PIL.Image`` for the best filter for downscaling."""
    if "ANTIALIAS" not in vars(image):
        image.ANTIALIAS = image.Resampling.LANCZOS  # type: ignore[attr-defined]
