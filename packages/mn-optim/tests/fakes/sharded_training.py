"""A small model, and its training with and without sharded state, on all ranks."""

import mn_optim  # noqa: F401, I001 - before Chainer
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from mn_comm import create_communicator
from mn_optim import AfterBackward, MultiNodeOptimizer, Sharded

COMM = create_communicator("two_dimensional")
RANK = COMM.rank


class Net(chainer.Chain):
    """A chain, so that gradients become final in the same order in every run; with one parameter larger than the rest.

    Args:
        dtype: The dtype of the parameters.
        n_last: The size of the last link.
    """

    def __init__(self, dtype="f4", n_last=3):
        super().__init__()
        initial = chainer.initializers.LeCunNormal(rng=np.random.RandomState(0))
        with chainer.using_config("dtype", {"f4": np.float32, "mixed16": chainer.mixed16}[dtype]), self.init_scope():
            self.first = L.Linear(5, 40, initialW=initial)
            self.norm = L.BatchNormalization(40)
            self.middle = L.Linear(40, 7, initialW=initial)
            self.lazy = L.Linear(None, 6, initialW=initial)
            self.last = L.Linear(6, n_last, initialW=initial)
        self.dtype = chainer.get_dtype() if dtype == "f4" else np.float16

    def forward(self, x, t):
        h = F.relu(self.norm(self.first(x.astype(self.dtype))))
        return F.softmax_cross_entropy(self.last(F.tanh(self.lazy(F.tanh(self.middle(h))))), t)


def batch(iteration, rank=RANK):
    random = np.random.RandomState(100 * iteration + rank)
    return random.rand(6, 5).astype("f4"), random.randint(0, 3, 6).astype("i4")


def parameters(model):
    return {name: param.data.copy() for name, param in model.namedparams()}


def same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, data in expected.items():
        assert actual[name].dtype == data.dtype
        np.testing.assert_array_equal(actual[name], data, err_msg=name)


def same_everywhere(model):
    for other in COMM.allgather_obj(parameters(model)):
        same(other, parameters(model))


def train(optimizer, steps=20, first=0):
    for iteration in range(first, first + steps):
        optimizer.update(optimizer.target, *batch(iteration))
    return optimizer.target


AFTER = AfterBackward()


def make(actual=None, model=None, comm=COMM, when=AFTER, sharded=False):
    actual = chainer.optimizers.Adam() if actual is None else actual
    optimizer = MultiNodeOptimizer(actual, comm, Sharded(when) if sharded else when)
    return optimizer.setup(Net() if model is None else model)


def states(optimizer):
    """Return the arrays of this rank's state, by name."""
    return {
        f"{name}/{key}": value
        for name, param in optimizer.target.namedparams()
        for key, value in (getattr(param.update_rule, "state", None) or {}).items()
        if isinstance(value, np.ndarray)
    }


def check_divided(optimizer, expected):
    """Check that the ranks together have the state of an unsharded optimizer, each array once."""
    found = {}
    for each in COMM.allgather_obj(states(optimizer)):
        assert not found.keys() & each.keys()
        found.update(each)
    same(found, states(expected))
