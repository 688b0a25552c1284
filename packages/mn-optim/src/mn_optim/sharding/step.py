"""A step of Chainer's optimizer in which this rank updates only the parameters that it owns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import chainer
import numpy as np

from mn_optim.sharding.means import Clipping, clips

__all__ = ["leaving_out"]

_GATHER = "mn_optim.sharding"


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
    clippings = {name: clipping(hook) for name, hook in replaced.items() if clipping is not None and clips(hook)}
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
