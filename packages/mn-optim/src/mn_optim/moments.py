"""What update rules with two arrays of state for each parameter, ``m`` and ``v``, have in common."""

from __future__ import annotations

from typing import Any

import chainer
from chainer import optimizer


class MomentsRule(optimizer.UpdateRule):  # type: ignore[misc]  # Chainer has no types
    """The base class of such update rules."""

    def init_state(self, param: chainer.Parameter) -> None:
        """Begin with zeros."""
        with chainer.using_device(param.device):
            self.state["m"] = param.device.xp.zeros_like(param.data)
            self.state["v"] = param.device.xp.zeros_like(param.data)

    def update_core_cpu(self, param: chainer.Parameter) -> None:
        """Take a step.

        Raises:
            ValueError: ``eps`` is 0 in the parameter's dtype, which would make parameters without a gradient NaN.
        """
        grad, eps = param.grad, self.hyperparam.eps
        if grad is None:
            return
        if eps and not grad.dtype.type(eps):
            raise ValueError(
                f"expected an eps that {grad.dtype} can represent, got {eps}: use a larger one, or use_fp32_update()"
            )
        self.take_step(param, grad, self.state["m"], self.state["v"])

    update_core_gpu = update_core_cpu

    def take_step(self, param: chainer.Parameter, grad: Any, m: Any, v: Any) -> None:
        """Change the parameter and the state in place."""
        raise NotImplementedError
