import sys
from pathlib import Path

import pytest

import mn_compat  # noqa: F401 - where no .pth file was run, this activates it

# For the tables of cases.
sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items):
    missing = _missing()
    for item in items:
        if missing and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {missing}"))


def _missing():
    """Return why there is no device, or an empty string."""
    try:
        import cupy
    except ImportError as error:
        return str(error).strip().splitlines()[0]
    try:
        return "" if cupy.cuda.runtime.getDeviceCount() else "no device"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)
