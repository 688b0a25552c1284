"""ChainerMN 7's function that makes a multi-node optimizer."""

from __future__ import annotations

import chainer

from mn_comm import CommunicatorBase
from mn_optim.optimizer import MultiNodeOptimizer
from mn_optim.when import AsInChainerMN7, OneStepLate


def create_multi_node_optimizer(
    actual_optimizer: chainer.Optimizer,
    communicator: CommunicatorBase,
    double_buffering: bool = False,
    zero_fill: bool = True,
) -> MultiNodeOptimizer:
    """Make an optimizer average its gradients over all ranks before each step, as in ChainerMN 7.

    For everything else, such as compression or fewer meetings, use :class:`MultiNodeOptimizer`. Collective if
    ``double_buffering`` is set.

    Args:
        actual_optimizer: A Chainer optimizer, already set up or not; or any object with its ``setup``, ``update`` and
            ``target``.
        communicator: The ranks that train replicas of the same model.
        double_buffering: Whether each step applies the averaged gradients of the previous step, while its own gradients
            are averaged in the background: :class:`OneStepLate` instead of :class:`AfterBackward`.
        zero_fill: Whether the missing gradient of an initialised parameter counts as zeros. Otherwise it is omitted
            from the average, and must be missing on every rank.

    Returns:
        The multi-node optimizer. All attributes except its own methods are those of ``actual_optimizer``.

    Raises:
        TypeError: ``actual_optimizer`` is not an optimizer.
        NotImplementedError: The script uses its own class of communicator, which does not support double buffering.
        RuntimeError: MPI was initialised without ``MPI_THREAD_MULTIPLE``, which double buffering needs.
    """
    when = OneStepLate(zero_fill) if double_buffering else AsInChainerMN7(zero_fill)
    return MultiNodeOptimizer(actual_optimizer, communicator, when)
