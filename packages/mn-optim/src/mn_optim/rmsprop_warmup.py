"""Momentum SGD that begins as RMSprop, for batches so large that training would not start well otherwise."""

from __future__ import annotations

import math
from typing import Any

import chainer
from chainer import optimizer

from mn_optim.moments import MomentsRule


class RMSpropWarmupRule(MomentsRule):
    """How :class:`RMSpropWarmup` changes one parameter: ``v`` is the velocity, ``m`` the mean of squared gradients."""

    def take_step(self, param: chainer.Parameter, grad: Any, m: Any, v: Any) -> None:
        """Change the parameter and the state in place."""
        hp, xp = self.hyperparam, param.device.xp
        m += (1 - hp.decay) * (grad * grad - m)
        v *= hp.momentum
        v -= (hp.alpha_sgd + hp.alpha_rmsprop / (xp.sqrt(m) + hp.eps)) * grad
        param.data += hp.lr * v


class RMSpropWarmup(optimizer.GradientMethod):  # type: ignore[misc]  # Chainer has no types
    """RMSprop that changes gradually to momentum SGD (Akiba, Suzuki and Fukuda 2017, arXiv 1711.04325).

    The values of ``momentum``, ``decay`` and ``eps`` are the paper's. A step adds ``lr`` times the velocity. From the
    velocity is subtracted the gradient times ``alpha_sgd + alpha_rmsprop / (sqrt(m) + eps)``, where ``m`` is a mean of
    squared gradients. With ``alpha_sgd=1`` and ``alpha_rmsprop=0`` it is momentum SGD.
    :class:`RMSpropWarmupSchedule` moves from one to the other during training.

    Args:
        lr: The learning rate.
        alpha_sgd: The share of momentum SGD.
        alpha_rmsprop: The share of RMSprop.
        momentum: How much of the velocity is kept in a step.
        decay: How much of the mean of squared gradients is kept.
        eps: Added to the root of this mean.
    """

    lr = optimizer.HyperparameterProxy("lr")
    alpha_sgd = optimizer.HyperparameterProxy("alpha_sgd")
    alpha_rmsprop = optimizer.HyperparameterProxy("alpha_rmsprop")
    momentum = optimizer.HyperparameterProxy("momentum")
    decay = optimizer.HyperparameterProxy("decay")
    eps = optimizer.HyperparameterProxy("eps")

    def __init__(
        self,
        lr: float = 0.1,
        alpha_sgd: float = 1.0,
        alpha_rmsprop: float = 0.0,
        momentum: float = 0.9,
        decay: float = 0.99,
        eps: float = 1e-8,
    ) -> None:
        super().__init__()
        self.hyperparam.lr = lr
        self.hyperparam.alpha_sgd = alpha_sgd
        self.hyperparam.alpha_rmsprop = alpha_rmsprop
        self.hyperparam.momentum = momentum
        self.hyperparam.decay = decay
        self.hyperparam.eps = eps

    def create_update_rule(self) -> RMSpropWarmupRule:
        """Return the rule for one parameter."""
        return RMSpropWarmupRule(self.hyperparam)


def sgd_share(epoch: float, center: float = 10.0, period: float = 5.0) -> float:
    """Return the share of SGD in an epoch: it grows exponentially to one half, then linearly to 1.

    Args:
        epoch: The number of completed epochs, which may be fractional.
        center: The epoch in which the share is one half.
        period: How many epochs a completely linear transition would take, half of them on each side of ``center``.
    """
    if epoch < center:
        return 0.5 * math.exp(2 * (epoch - center) / period)
    return min(1.0, 0.5 + (epoch - center) / period)
