"""LAMB: Adam with steps proportional to the norm of each parameter, for very large batches."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
from chainer import optimizer

from mn_optim.moments import MomentsRule


class LAMBRule(MomentsRule):
    """How :class:`LAMB` changes one parameter; its state is as Adam's."""

    def take_step(self, param: chainer.Parameter, grad: Any, m: Any, v: Any) -> None:
        """Change the parameter and the state in place."""
        hp, xp = self.hyperparam, param.device.xp
        m += (1 - hp.beta1) * (grad - m)
        v += (1 - hp.beta2) * (grad * grad - v)
        direction = m / (1 - hp.beta1**self.t)
        direction /= xp.sqrt(v / (1 - hp.beta2**self.t)) + hp.eps
        direction += hp.weight_decay_rate * param.data
        param.data -= hp.alpha * _trust_ratio(xp, param.data, direction, hp.max_norm) * direction


class LAMB(optimizer.GradientMethod):  # type: ignore[misc]  # Chainer has no types
    """Layer-wise adaptive moments (You et al. 2020, arXiv 1904.00962, algorithm 2).

    The step is Adam's direction, with its bias corrections, plus decoupled weight decay, multiplied for each parameter
    by the trust ratio: the norm of the parameter divided by the norm of this direction. If either norm is 0, the ratio
    is 1.

    Args:
        alpha: The learning rate.
        beta1: How much of the mean of gradients is kept in a step.
        beta2: The same for their squares.
        eps: Added to the root of the mean of squares.
        weight_decay_rate: How much of the parameter is added to the direction.
        max_norm: An upper bound for the norm of a parameter in the ratio, which limits the steps of large parameters,
            as the paper's phi does; ``None`` for no bound.
    """

    alpha = optimizer.HyperparameterProxy("alpha")
    beta1 = optimizer.HyperparameterProxy("beta1")
    beta2 = optimizer.HyperparameterProxy("beta2")
    eps = optimizer.HyperparameterProxy("eps")
    weight_decay_rate = optimizer.HyperparameterProxy("weight_decay_rate")
    max_norm = optimizer.HyperparameterProxy("max_norm")

    def __init__(
        self,
        alpha: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        weight_decay_rate: float = 0.01,
        max_norm: float | None = None,
    ) -> None:
        super().__init__()
        self.hyperparam.alpha = alpha
        self.hyperparam.beta1 = beta1
        self.hyperparam.beta2 = beta2
        self.hyperparam.eps = eps
        self.hyperparam.weight_decay_rate = weight_decay_rate
        self.hyperparam.max_norm = max_norm

    def create_update_rule(self) -> LAMBRule:
        """Return the rule for one parameter."""
        return LAMBRule(self.hyperparam)


def _trust_ratio(xp: Any, value: Any, direction: Any, max_norm: float | None) -> Any:
    """Return the factor for a direction; on a device without waiting for it."""
    dtype = np.promote_types(value.dtype, "f4")
    norm, length = (xp.sqrt((array.astype(dtype) ** 2).sum()) for array in (value, direction))
    if max_norm is not None:
        norm = xp.minimum(norm, dtype.type(max_norm))
    is_usable = (norm > 0) & (length > 0)
    return xp.where(is_usable, norm / xp.where(is_usable, length, 1), 1).astype(value.dtype)
