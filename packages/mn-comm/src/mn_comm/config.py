"""The configuration of one communicator: immutable, its own, and inherited by what is split off it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

__all__ = ["Config"]


@dataclass(frozen=True)
class Config:
    """The settings that scripts pass to ``create_communicator`` or ``set_config``.

    Attributes:
        batched_copy: Whether gradients on a device are packed by one kernel for all of them. Gradients in host
            memory are copied one by one either way.
    """

    batched_copy: bool = True

    def with_value(self, name: str, value: Any) -> Config:
        """Return this configuration with one setting changed.

        Raises:
            ValueError: There is no setting of that name.
            TypeError: The value is not of the setting's type.
        """
        self._check_name(name)
        if not isinstance(value, bool):
            raise TypeError(f"expected a bool for {name}, got {type(value).__name__}: {value!r}")
        return replace(self, **{name: value})

    def get(self, name: str | None = None) -> Any:
        """Return one setting, or all of them as a dictionary.

        Raises:
            ValueError: There is no setting of that name.
        """
        if name is None:
            return asdict(self)
        self._check_name(name)
        return getattr(self, name)

    def _check_name(self, name: str) -> None:
        names = [field.name for field in fields(self)]
        if name not in names:
            raise ValueError(f"expected the name of a setting, one of {', '.join(names)}; got {name!r}")
