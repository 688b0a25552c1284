"""Makes Chainer 7.8.1 work on current versions of Python, NumPy and CuPy.

Importing this package activates it, unless the start-up file of an installed wheel has done so already.
"""

from mn_compat.activation import activate, is_active
from mn_compat.restoring import restore
from mn_compat.status import Status, status

__all__ = ["Status", "activate", "is_active", "restore", "status"]
__version__ = "8.0.0a1"

activate()
