"""Skips the tests marked ``gpu`` where there is no device, with the reason."""

import pytest


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    missing = _missing_for_gpu() if marked else None
    for item in marked:
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {missing}"))


def _missing_for_gpu():
    """Return why there is no device to run on, or ``None`` if there is one."""
    try:
        import cupy
    except ImportError as error:
        return str(error)
    try:
        return None if cupy.cuda.runtime.getDeviceCount() else "no device"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)
