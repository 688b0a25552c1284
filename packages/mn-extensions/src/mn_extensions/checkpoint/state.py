"""The content of a checkpoint: the target's state from Chainer's serializers, and that of NumPy's random numbers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from chainer.serializers import npz

from mn_extensions.checkpoint.arrays import State, is_none

_RANDOM = "chainermn_numpy_random/"
_RANDOM_PARTS = ("keys", "position", "has_gauss", "gauss")
_GENERATOR = "MT19937"  # NumPy's own
_OF_AN_OPTIMIZER = re.compile(r"(^|/)optimizer:")
# The state of compression and of local steps is not compared here: the optimizer itself checks it, and resets it if
# necessary. An optimizer that has taken no step has nothing to compare. A shard's arrays say to which parameters the
# state belongs; the optimizer itself checks them.
_OF_COMMUNICATION = re.compile(
    r"(^|/)optimizer:[^/]*/(multi_node_local_steps|multi_node_synchronous_first|compression|multi_node_shard)/"
)
_OF_A_MODEL = re.compile(r"(^|/)model:")
# The name that Chainer's iterators use if they do not find the usual one: Chainer saved under it until version 3.
_OLD_NAMES = {"order": "_order"}


def state_of(target: Any) -> State:
    """Return the state of a target by name; arrays are not copied.

    It includes the state of NumPy's global random number generator, which shuffles Chainer's iterators and draws its
    dropout masks, so that training can continue in the same way.

    Args:
        target: Anything that Chainer can serialize: a trainer, a link, an optimizer.
    """
    state = {name: np.asarray(value) for name, value in npz.serialize(target).items()}
    return state | _random_state()


def check_fits(state: State, target: Any) -> None:
    """Raise unless a state can be loaded into a target; nothing is changed.

    Args:
        state: What :func:`state_of` returned for the same kind of target.
        target: The target to be loaded.

    Raises:
        ValueError: An array is missing or has another shape, or the saved model had more arrays.
    """
    expected = _arrays_of(target)
    # Chainer keeps the names of parameters in sets, whose order changes from run to run.
    for name, array in sorted(expected.items()):
        found = state.get(name, state.get(_old_name(name)))
        if found is None:
            raise ValueError(f"the checkpoint is of a different model: it has no {name}, which has shape {array.shape}")
        if found.shape != array.shape and not is_none(found) and not is_none(array):
            raise ValueError(
                f"the checkpoint is of a different model: expected shape {array.shape} for {name}, got {found.shape}"
            )
    unknown = sorted(name for name in state if _OF_A_MODEL.search(name) and name not in expected)
    if unknown:
        raise ValueError(f"the checkpoint is of a different model: this one has no {unknown[0]}")


def load_state(state: State, target: Any) -> None:
    """Load a state into a target.

    Args:
        state: What :func:`state_of` returned.
        target: The target, for which :func:`check_fits` did not raise.
    """
    npz.NpzDeserializer(_Lenient(state)).load(target)
    if _RANDOM + "keys" in state:
        keys, position, has_gauss, gauss = (state[_RANDOM + name] for name in _RANDOM_PARTS)
        np.random.set_state((_GENERATOR, keys, int(position), int(has_gauss), float(gauss)))


class _Lenient(State):
    """A state in which the arrays of optimizers may be missing: an optimizer has none before its first step.

    The first update of a multi-node optimizer takes no step, so a checkpoint after one iteration is such a state.
    Chainer refuses to load it unless it gets ``None`` for the missing arrays.
    """

    def __missing__(self, name: str) -> np.ndarray[Any, Any]:
        if _OF_AN_OPTIMIZER.search(name):
            return np.asarray(None)
        raise KeyError(name)


def _random_state() -> State:
    parts = np.random.get_state(legacy=False)
    if parts["bit_generator"] != _GENERATOR:  # the program has replaced it: keep its generator
        return {}
    values = (parts["state"]["key"], parts["state"]["pos"], parts["has_gauss"], parts["gauss"])
    return {_RANDOM + name: np.asarray(value) for name, value in zip(_RANDOM_PARTS, values, strict=True)}


def _arrays_of(target: Any) -> State:
    # A trainer that does not run yet cannot be serialized, but its updater, which holds the models, can.
    updater = getattr(target, "updater", None)
    prefix, whole = ("", target) if updater is None else ("updater/", updater)
    arrays = {prefix + name: np.asarray(value) for name, value in npz.serialize(whole).items()}
    checked = (name for name in arrays if not _OF_COMMUNICATION.search(name))
    return {name: arrays[name] for name in checked if arrays[name].ndim or _OF_A_MODEL.search(name)}


def _old_name(name: str) -> str:
    path, slash, last = name.rpartition("/")
    return path + slash + _OLD_NAMES.get(last, last)
