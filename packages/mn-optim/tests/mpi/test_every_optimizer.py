"""Every optimizer of Chainer with sharded state: the only difference is the memory."""

import functools

import chainer
import numpy as np
import pytest
from sharded_training import COMM, Net, check_divided, make, parameters, same, same_everywhere, train

from mn_optim import AfterBackward, DuringBackward

OPTIMIZERS = {
    "AdaDelta": chainer.optimizers.AdaDelta,
    "AdaGrad": chainer.optimizers.AdaGrad,
    "Adam": lambda: chainer.optimizers.Adam(weight_decay_rate=0.1),
    "AdamW": chainer.optimizers.AdamW,
    "AMSGrad": chainer.optimizers.AMSGrad,
    "AdaBound": chainer.optimizers.AdaBound,
    "AMSBound": chainer.optimizers.AMSBound,
    "CorrectedMomentumSGD": chainer.optimizers.CorrectedMomentumSGD,
    "MomentumSGD": chainer.optimizers.MomentumSGD,
    "MSVAG": chainer.optimizers.MSVAG,
    "NesterovAG": chainer.optimizers.NesterovAG,
    "RMSprop": chainer.optimizers.RMSprop,
    "RMSpropGraves": chainer.optimizers.RMSpropGraves,
    "SGD": chainer.optimizers.SGD,
    "SMORMS3": chainer.optimizers.SMORMS3,
}


def test_every_optimizer_of_chainer_is_tried():
    kinds = {
        name
        for name, kind in vars(chainer.optimizers).items()
        if isinstance(kind, type) and issubclass(kind, chainer.optimizer.GradientMethod)
    }
    assert kinds == set(OPTIMIZERS)


def trained(name, dtype, **options):
    actual = OPTIMIZERS[name]()
    if dtype == "mixed16":
        actual.use_fp32_update()
        actual.loss_scaling(interval=3)
    optimizer = make(actual, Net(dtype), **options)
    with np.errstate(all="ignore"):
        train(optimizer)
    return optimizer


# Without sharding, it makes no difference when the gradients are averaged: the same bits.
reference = functools.cache(trained)


@pytest.mark.parametrize("when", [AfterBackward(), DuringBackward()], ids=["after", "during"])
@pytest.mark.parametrize("dtype", ["f4", "mixed16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_is_unsharded(name, dtype, when):
    expected, actual = reference(name, dtype), trained(name, dtype, sharded=True, when=when)
    assert actual.t == expected.t >= 18
    assert actual._loss_scale == expected._loss_scale
    same(parameters(actual.target), parameters(expected.target))
    same_everywhere(actual.target)
    check_divided(actual, expected)
    for (key, param), (_, other) in zip(actual.target.namedparams(), expected.target.namedparams(), strict=True):
        assert param.update_rule.t == other.update_rule.t, key
    masters = [param.update_rule._fp32_param is not None for _, param in sorted(actual.target.namedparams())]
    has_master = dtype == "mixed16"
    halves = [param.dtype == np.float16 for _, param in sorted(actual.target.namedparams())]
    assert [sum(each) for each in zip(*COMM.allgather_obj(masters), strict=True)] == [has_master * h for h in halves]
