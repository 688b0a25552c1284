"""Whether all ranks hold the same parameters, so that no update has to be spent on sharing them out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from chainer.backends import cuda

__all__ = ["assume_synchronized"]


def assume_synchronized(target: Any, optimizer: Any = None) -> None:
    """Tell multi-node optimizers that all ranks hold the same parameters, if they do; collective.

    Args:
        target: A trainer, whose optimizers are told if ``optimizer`` is ``None``; anything else has none.
        optimizer: The optimizer to be told. It counts as a multi-node one if it has ``assume_synchronized``.
    """
    for each in _optimizers_of(target) if optimizer is None else [optimizer]:
        if hasattr(each, "assume_synchronized") and each.target is not None:
            digests = each.communicator.allgather_obj(_digest(each.target))
            if all(digest == digests[0] for digest in digests):
                each.assume_synchronized()


def _optimizers_of(target: Any) -> Iterable[Any]:
    updater = getattr(target, "updater", None)
    return () if updater is None else updater.get_all_optimizers().values()


def _digest(model: Any) -> bytes:
    hashed = hashlib.blake2b(digest_size=16)
    for name, param in sorted(model.namedparams()):
        array = cuda.to_cpu(param.data) if param.data is not None else None
        hashed.update(repr((name, None if array is None else (array.shape, array.dtype))).encode())
        hashed.update(b"" if array is None else array.tobytes())
    return hashed.digest()
