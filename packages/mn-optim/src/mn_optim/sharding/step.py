"""A step of Chainer's optimizer in which this rank updates only the parameters that it owns.

If only the owners need the means, the other gradients are not needed after averaging, and their memory is freed.
"""

from __future__ import annotations

import itertools
import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import chainer
import numpy as np

from mn_comm import CommunicatorBase

Params = Mapping[str, chainer.Parameter]

_GATHER = "mn_optim.sharding"
_ALIGNMENT = 64


def need_of(optimizer: Any, params: Params) -> str | None:
    """Return what ranks must exchange in a step with only their own means; ``None`` if each rank needs all means.

    Args:
        optimizer: The actual optimizer.
        params: The parameters that it updates.

    Returns:
        A short description, the same on every rank that has the same optimizer.
    """
    is_known = type(optimizer).update is chainer.GradientMethod.update and "update" not in vars(optimizer)
    if not is_known or chainer.is_debug() or any(type(param.data) is not np.ndarray for param in params.values()):
        return None
    before, after = _hooks_of(optimizer)
    others = [hook for hook in before.values() if not getattr(hook, "call_for_each_param", False)]
    # Hooks after the update may read any gradient, and so may a script's own hook over all parameters.
    if after or not all(map(_clips, others)):
        return None
    return f"{len(others)} GradientClipping{' and dynamic loss scaling' * _is_scaled(optimizer)}"


def _clips(hook: Any) -> bool:
    """Return whether a hook is Chainer's ``GradientClipping``, which needs only the norm of all gradients."""
    return type(hook) is chainer.optimizer_hooks.GradientClipping


def _is_scaled(optimizer: Any) -> bool:
    return bool(optimizer._loss_scaling_is_dynamic)  # noqa: SLF001 - Chainer has no public name for it


def drop(params: Iterable[chainer.Parameter]) -> None:
    """Replace gradients by zeros, which take no memory until they are written to.

    Chainer would allocate and fill missing gradients; NumPy, too, writes to memory that it reuses.
    """
    dropped = list(params)
    ends = list(itertools.accumulate(-(-param.data.nbytes // _ALIGNMENT) * _ALIGNMENT for param in dropped))
    if not ends or not ends[-1]:
        return
    pages = mmap.mmap(-1, ends[-1], mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(pages, np.uint8)
    for param, begin in zip(dropped, [0, *ends], strict=False):
        param.grad = memory[begin : begin + param.data.nbytes].view(param.dtype).reshape(param.shape)


def share_non_finite(communicator: CommunicatorBase, optimizer: Any, params: Params, owners: Mapping[str, int]) -> None:
    """Let dynamic loss scaling see on every rank which means are not finite; collective, if it is used.

    Args:
        communicator: The ranks.
        optimizer: The actual optimizer.
        params: The parameters that have owners.
        owners: The rank that has each mean.
    """
    if not _is_scaled(optimizer):
        return
    mine = communicator.rank
    grads = [(owners[name] == mine, param.grad) for name, param in params.items()]
    found = [is_own and grad is not None and not np.isfinite(grad).all() for is_own, grad in grads]
    is_bad = communicator.allreduce(np.array(found, np.int32))
    for param, (is_own, grad), bad in zip(params.values(), grads, is_bad, strict=True):
        if bad and not is_own:  # its contents do not matter here
            param.grad = np.full_like(param.data if grad is None else grad, np.nan)


class Clipping:
    """``GradientClipping`` by the norm of all means, to which each rank contributes its own gradients.

    Each owner adds up the squares within its gradients, and these sums are added in the order of the parameters. So the
    norm is the same, bit for bit, as on one rank with all gradients.

    Args:
        hook: Chainer's hook.
        communicator: The ranks.
        owner_of: The owners of parameters, by ``id``. All ranks have the means of other parameters.
    """

    def __init__(self, hook: Any, communicator: CommunicatorBase, owner_of: Mapping[int, int]) -> None:
        self._hook = hook
        self._communicator = communicator
        self._owner_of = owner_of
        self.has_met = False

    def __call__(self, optimizer: Any) -> None:
        """Clip this rank's gradients; collective."""
        params = list(optimizer.target.params(False))
        total = sum(self._meet([self._square_of(param) for param in params], params))
        rate = self._hook.threshold / np.sqrt(total)
        if rate >= 1:
            return
        for param in params:
            if self._is_mean(param):
                param.grad *= rate

    def take_part(self, optimizer: Any) -> None:
        """Take part in the other ranks' call after this rank's step has failed, so that they continue; collective."""
        if not self.has_met:
            params = list(optimizer.target.params(False))
            self._meet([0.0] * len(params), params)

    def _square_of(self, param: chainer.Parameter) -> float:
        """Return the sum of the squares of a gradient; 0 if another rank owns it."""
        if not self._is_mean(param):
            return 0.0
        flat = param.grad.ravel()
        return float(flat.dot(flat))  # from here on in double precision, as in mn_compat

    def _is_mean(self, param: chainer.Parameter) -> bool:
        return self._owner_of.get(id(param)) in (None, self._communicator.rank)

    def _meet(self, squares: Sequence[float], params: Sequence[chainer.Parameter]) -> list[float]:
        """Return the sum of the squares of each gradient; collective."""
        is_owned = np.array([id(param) in self._owner_of for param in params], bool)
        mine = np.array(squares, np.float64)
        total = self._communicator.allreduce(np.where(is_owned, mine, 0))
        self.has_met = True
        found: list[float] = np.where(is_owned, total, mine).tolist()
        return found


@contextmanager
def leaving_out(
    optimizer: Any,
    params: Sequence[chainer.Parameter],
    gather: Callable[[], None],
    clipping: Callable[[Any], Clipping] | None = None,
) -> Iterator[None]:
    """Return a context in which an optimizer's step does not update some parameters.

    Args:
        optimizer: The optimizer; its hooks have the same effect as without other ranks.
        params: The parameters that other ranks update.
        gather: Called before hooks that run after the update, if there are any: they need all updated parameters.
        clipping: Replaces ``GradientClipping`` if gradients are means only on their owners; then there are no other
            hooks over all gradients.
    """
    rules = [param.update_rule for param in params]
    before, after = _hooks_of(optimizer)
    replaced: dict[str, Any] = {}
    if clipping is not None or all(getattr(hook, "call_for_each_param", False) for hook in before.values()):
        # A hook over all parameters must see the effect of other hooks on all gradients.
        replaced = dict(before)
    clippings = {name: clipping(hook) for name, hook in replaced.items() if clipping is not None and _clips(hook)}
    hidden = [vars(rule).get("update") for rule in rules]
    try:
        for rule in rules:
            rule.update = partial(_only_count, rule, clipping is None)
        left_out = set(map(id, params))
        before.update({name: _Elsewhere(hook, left_out) for name, hook in replaced.items()})
        before.update(clippings)
        if after:
            after[_GATHER] = lambda optimizer: gather()
            after.move_to_end(_GATHER, last=False)
        yield
    except Exception:
        for each in clippings.values():
            each.take_part(optimizer)
        raise
    finally:
        after.pop(_GATHER, None)
        before.update({name: hook for name, hook in replaced.items() if name in before})
        for rule, update in zip(rules, hidden, strict=True):
            vars(rule).pop("update", None)
            if update is not None:
                rule.update = update


def _hooks_of(optimizer: Any) -> tuple[OrderedDict[str, Any], OrderedDict[str, Any]]:
    """Return the hooks before and after the update, from attributes of Chainer 7.8.1: its code will not change."""
    hookable = getattr(optimizer, "_hookable", None)
    if hookable is None:
        return OrderedDict(), OrderedDict()
    return hookable._pre_update_hooks, hookable._post_update_hooks  # noqa: SLF001


class _Elsewhere:
    """A hook for each parameter, which skips the parameters of other ranks.

    Args:
        hook: The hook.
        left_out: The ids of parameters to skip.
    """

    call_for_each_param = True

    def __init__(self, hook: Callable[[Any, chainer.Parameter], None], left_out: set[int]) -> None:
        self._hook = hook
        self._left_out = left_out

    def __call__(self, rule: Any, param: chainer.Parameter) -> None:
        if id(param) not in self._left_out:
            self._hook(rule, param)


def _only_count(rule: Any, has_mean: bool, param: chainer.Parameter) -> None:
    """Do the remaining part of an update on a rank that does not own the parameter.

    Args:
        rule: The update rule.
        has_mean: Whether the gradient is a mean also on this rank.
        param: The parameter.
    """
    if not rule.enabled:
        return
    rule.t += 1
    if not has_mean:
        return
    scale = param._loss_scale  # noqa: SLF001 - Chainer has no public name for it
    has_master = rule._use_fp32_update and param.dtype == np.float16  # noqa: SLF001 - whose gradient is divided instead
    if scale is not None and not has_master and param.grad is not None:
        with chainer.using_device(param.device):
            param.grad /= scale
