"""Training with each compression against the equations of its paper, which are written down here again in NumPy.

Every rank computes what all ranks do, and compares parameters after each step. The gradient of a rank is the difference
between its parameters and a target, which differs in each step.
"""

from collections.abc import Callable, Iterator, Sequence

import chainer
import numpy as np
import pytest

from mn_comm import create_communicator
from mn_compress import Compression, Int8, OneBit, PowerSGD, TopK
from mn_optim import AfterBackward, MultiNodeOptimizer

COMM = create_communicator("flat")  # between all ranks, as between nodes
SIZE = COMM.size
SHAPES = {"bias": (9,), "kernel": (6, 5, 3), "matrix": (16, 12)}  # in the order in which they are concatenated
ENDS = np.cumsum([np.prod(shape) for shape in SHAPES.values()]).tolist()
MATRICES = ["kernel", "matrix"]
PLACES = dict(zip(SHAPES, map(slice, [0, *ENDS], ENDS), strict=False))
START = np.random.RandomState(0).randn(ENDS[-1]).astype(np.float32)
LR = 0.1

Array = np.ndarray
Average = Callable[[int, Sequence[Array]], Array]
"""Returns an average, given the number of a step and the gradients of all ranks."""


class Net(chainer.Chain):
    """Nothing but parameters."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            for name, place in PLACES.items():
                setattr(self, name, chainer.Parameter(START[place].reshape(SHAPES[name]).copy()))

    @property
    def values(self) -> Array:
        return np.concatenate([getattr(self, name).array.ravel() for name in SHAPES])

    def set_gradient(self, grad: Array) -> None:
        for name, place in PLACES.items():
            getattr(self, name).grad = grad[place].reshape(SHAPES[name]).astype(np.float32)


def gradient(values: Array, step: int, rank: int) -> Array:
    return values - np.random.RandomState([step, rank]).randn(START.size).astype(np.float32)


def take_steps(scheme: Compression, steps: int) -> Iterator[Array]:
    """Train, and yield the parameters after each step."""
    model = Net()
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(LR), COMM, AfterBackward(send=scheme)).setup(model)
    optimizer.assume_synchronized()
    for step in range(steps):
        model.set_gradient(gradient(model.values, step, COMM.rank))
        optimizer.update()
        yield model.values


def exact(step: int, grads: Sequence[Array]) -> Array:
    return np.mean(grads, axis=0)


def expect(scheme: Compression, average: Average, steps: int = 30) -> None:
    """Expect the same parameters as those of SGD with another average of the gradients of all ranks."""
    values = START
    for step, trained in enumerate(take_steps(scheme, steps)):
        grads = [gradient(values, step, rank) for rank in range(SIZE)]
        values = values - np.float32(LR) * (average(step, grads) if SIZE > 1 else grads[0])
        np.testing.assert_allclose(trained, values, rtol=0, atol=1e-4, err_msg=f"step {step}")


class Factors:
    """PowerSGD, arXiv 1905.13727, algorithms 1 and 2; orthogonalised by Gram and Schmidt, as there."""

    def __init__(self, n_columns: int, compressed: Sequence[str]) -> None:
        self.shapes = {name: (SHAPES[name][0], -1) for name in compressed}
        random = np.random.default_rng(0)
        self.right = {
            name: random.standard_normal((np.prod(SHAPES[name][1:]), n_columns), np.float32) for name in compressed
        }
        self.errors = np.zeros((SIZE, START.size), np.float32)

    def __call__(self, step: int, grads: Sequence[Array]) -> Array:
        mean = np.mean(grads, axis=0)
        for name, shape in self.shapes.items():
            place = PLACES[name]
            summed = [(grad + error)[place].reshape(shape) for grad, error in zip(grads, self.errors, strict=True)]
            left = np.mean([each @ self.right[name] for each in summed], axis=0)
            for i, column in enumerate(left.T):
                column -= left[:, :i] @ (left[:, :i].T @ column)
                column /= np.linalg.norm(column)
            self.right[name] = np.mean([each.T @ left for each in summed], axis=0)
            product = left @ self.right[name].T
            self.errors[:, place] = [(each - product).ravel() for each in summed]
            mean[place] = product.ravel()
        return mean


@pytest.mark.parametrize("n_columns, compressed", [(1, MATRICES), (3, MATRICES), (5, MATRICES[1:])])
def test_power_sgd(n_columns, compressed):
    scheme = PowerSGD(rank=n_columns, start_iter=0, min_compression_rate=1)
    # Not more steps: roundings grow, because the part that is omitted decides on the next factors.
    expect(scheme, Factors(n_columns, compressed), steps=8)


class Largest:
    """Deep Gradient Compression, arXiv 1712.01887, algorithm 4: local clipping, momentum correction and its masking."""

    def __init__(self, ratio: float, momentum: float, clip: float, warm_up: int) -> None:
        self.ratios = [ratio ** min(1, (step + 1) / (warm_up + 1)) for step in range(100)]
        self.momentum, self.clip = momentum, clip
        self.velocities, self.waiting = np.zeros((2, SIZE, START.size), np.float32)

    def __call__(self, step: int, grads: Sequence[Array]) -> Array:
        total = np.zeros_like(START)
        for grad, velocity, waiting in zip(grads, self.velocities, self.waiting, strict=True):
            limit = self.clip / np.sqrt(SIZE)
            velocity *= self.momentum
            velocity += grad * min(1, limit / np.linalg.norm(grad))
            waiting += velocity
            is_sent = np.argsort(abs(waiting))[-round(self.ratios[step] * waiting.size) :]
            total[is_sent] += waiting[is_sent]
            velocity[is_sent] = waiting[is_sent] = 0
        return total / SIZE


@pytest.mark.parametrize("ratio, momentum, clip, warm_up", [(0.1, 0, 1e9, 0), (0.05, 0.8, 4.0, 10)])
def test_top_k(ratio, momentum, clip, warm_up):
    expect(TopK(ratio, momentum, clip, warm_up), Largest(ratio, momentum, clip, warm_up))


class InTwoStages:
    """Each rank adds up one range of quantised blocks, and quantises the mean: Seide et al. 2014, arXiv 2306.10209."""

    def __init__(self, quantise: Callable[[Array], Array], block: int) -> None:
        self.quantise, self.block = quantise, block
        n_blocks = -(-START.size // block)
        points = [min(START.size, n_blocks * rank // SIZE * block) for rank in range(SIZE + 1)]
        self.ranges = list(map(slice, points, points[1:]))
        self.errors = np.zeros((SIZE, START.size), np.float32)

    def said(self, rank: int, part: slice, values: Array) -> Array:
        """Return what a rank says of values, and keep the rest."""
        values = values + self.errors[rank, part]
        blocks = [self.quantise(values[i : i + self.block]) for i in range(0, values.size, self.block)]
        self.errors[rank, part] = values - np.concatenate([values[:0], *blocks])
        return values - self.errors[rank, part]

    def __call__(self, step: int, grads: Sequence[Array]) -> Array:
        mean = np.empty_like(START)
        for owner, part in enumerate(self.ranges):
            own = grads[owner][part]
            summands = [own if rank == owner else self.said(rank, part, grads[rank][part]) for rank in range(SIZE)]
            mean[part] = self.said(owner, part, np.mean(summands, axis=0))
        return mean


def signs(block: Array) -> Array:
    return np.where(np.signbit(block), -1, 1) * abs(block).mean()


def integers(block: Array) -> Array:
    unit = abs(block).max() / 127
    return np.rint(block * (1 / unit)) * unit


@pytest.mark.parametrize("start", [0, 5])
def test_one_bit(start):
    average = InTwoStages(signs, 32)
    expect(OneBit(32, start), lambda step, grads: (average if step >= start else exact)(step, grads))


def test_int8():
    expect(Int8(16), InTwoStages(integers, 16))


def test_stochastic_rounding_has_no_bias():
    schemes = [Int8(64, "stochastic", seed) for seed in range(100)]
    errors = [next(take_steps(scheme, 1)) for scheme in schemes]
    errors -= START - LR * exact(0, [gradient(START, 0, rank) for rank in range(SIZE)])
    # Two roundings, each wrong by less than the unit of its block, which is less than a 127th of 5.
    deviation = 2 * LR * 5 / 127
    assert abs(np.mean(errors, axis=0)).max() < 5 * deviation / np.sqrt(len(schemes))
    assert abs(np.mean(errors)) < 5 * deviation / np.sqrt(len(schemes) * START.size)
