"""Deep copies of links that hold a communicator: the copy shares the communicator, which cannot be copied."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from mn_comm import CommunicatorBase

_T = TypeVar("_T")


def deepcopy_sharing(link: _T, communicator: CommunicatorBase, memo: dict[int, Any]) -> _T:
    """Return a deep copy of a link, except for its communicator; to be called by ``__deepcopy__``."""
    twin = type(link).__new__(type(link))
    memo[id(link)] = twin
    memo[id(communicator)] = communicator
    twin.__dict__.update(copy.deepcopy(link.__dict__, memo))
    return twin
