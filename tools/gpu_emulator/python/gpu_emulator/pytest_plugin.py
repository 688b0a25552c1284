"""For pytest, ``-p gpu_emulator.pytest_plugin``: a test during which the emulator has found a fault fails."""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import pytest

from gpu_emulator import faults


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, Any, Any]:
    """Fail the test if making its fixtures has made a fault."""
    return (yield from _without_faults())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """Fail the test if it has made a fault."""
    return (yield from _without_faults())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, Any, Any]:
    """Fail the test if the end of its fixtures has made a fault."""
    return (yield from _without_faults())


def _without_faults() -> Generator[None, Any, Any]:
    """Fail, with the lines that made the faults."""
    try:
        return (yield)
    finally:
        _synchronize()
        found = faults.take()
        if found:
            pytest.fail(f"the GPU emulator has found faults:\n{found}", pytrace=False)


def _synchronize() -> None:
    cupy: Any = sys.modules.get("cupy")
    if cupy is not None:
        for device in range(cupy.cuda.runtime.getDeviceCount()):
            with cupy.cuda.Device(device):
                cupy.cuda.runtime.deviceSynchronize()
