"""Making the parameters of all ranks equal before they are saved, and checking that they are equal after loading."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from chainer.backends import cuda

from mn_comm.building_blocks import synchronize_replicas


def synchronize(target: Any) -> None:
    """Make the parameters of all ranks equal if an optimizer lets them differ temporarily; collective.

    Args:
        target: A trainer, an updater, an optimizer, or a link; anything else has no parameters.
    """
    for each in optimizers_of(target) or [target]:
        if hasattr(type(each), "synchronize") and getattr(each, "target", None) is not None:
            each.synchronize()
        elif hasattr(type(each), "namedparams"):
            synchronize_replicas(each)


def consolidate(target: Any, to: int) -> None:
    """Gather sharded optimizer state on one rank, so that it can save the state of all ranks; collective.

    Args:
        target: The object to save, for example a trainer.
        to: The rank.
    """
    for each in optimizers_of(target) or [target]:
        if hasattr(type(each), "consolidate") and getattr(each, "target", None) is not None:
            each.consolidate(to)


@contextmanager
def own_parts(target: Any) -> Iterator[None]:
    """Return a context in which each rank saves only its own part of a sharded optimizer state.

    Args:
        target: The object to save, for example a trainer.
    """
    with ExitStack() as stack:
        for each in optimizers_of(target) or [target]:
            if hasattr(type(each), "own_part"):
                stack.enter_context(each.own_part())
        yield


def assume_synchronized(target: Any, optimizer: Any = None) -> None:
    """Tell multi-node optimizers that all ranks hold the same parameters, if they do; collective.

    Args:
        target: A trainer or updater, whose optimizers are informed if ``optimizer`` is ``None``; anything else has
            none.
        optimizer: The optimizer to inform. It counts as a multi-node optimizer if it has ``assume_synchronized``.
    """
    for each in optimizers_of(target) if optimizer is None else [optimizer]:
        if hasattr(each, "assume_synchronized") and each.target is not None:
            digests = each.communicator.allgather_obj(_digest(each.target))
            if all(digest == digests[0] for digest in digests):
                each.assume_synchronized()


def optimizers_of(target: Any) -> list[Any]:
    """Return the optimizers of a trainer or updater, in the order of their names; of anything else, none."""
    updater: Any = getattr(target, "updater", target)
    if not hasattr(type(updater), "get_all_optimizers"):  # an attribute of the class: a mock object has every attribute
        return []
    return [optimizer for _, optimizer in sorted(updater.get_all_optimizers().items())]


def _digest(model: Any) -> bytes:
    hashed = hashlib.blake2b(digest_size=16)
    for name, param in sorted(model.namedparams()):
        array = cuda.to_cpu(param.data) if param.data is not None else None
        hashed.update(repr((name, None if array is None else (array.shape, array.dtype))).encode())
        hashed.update(b"" if array is None else array.tobytes())
    return hashed.digest()
