"""For pytest, ``-p gpu_emulator.pytest_plugin``: a test during which the emulator has found a fault fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpu_emulator import faults


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail the test, with the lines that made the faults."""
    faults.take()
    try:
        yield
    finally:
        _synchronize()
        found = faults.take()
        if found:
            pytest.fail(f"the GPU emulator has found faults:\n{found}", pytrace=False)


def _synchronize() -> None:
    import sys

    cupy: Any = sys.modules.get("cupy")
    if cupy is not None:
        cupy.cuda.Device().synchronize()
