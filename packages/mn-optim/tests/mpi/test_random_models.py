"""Random models, gradients, strategies, schemes and exceptions, compared with a mean computed by NumPy.

All ranks draw the same examples. ``EXAMPLES=2000`` in the environment makes it a long test.
"""

import gc
import os
import sys
import traceback
from unittest import mock

import chainer
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mn_optim  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_comm.gradients import blocks, share_size, strategy
from mn_optim import AfterBackward, DuringBackward, MultiNodeOptimizer, OneStepLate

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
SCHEMES = {
    "plain": AfterBackward(),
    "plain, without zero_fill": AfterBackward(zero_fill=False),
    "overlap": DuringBackward(bucket_bytes=100),
    "overlap, one by one": DuringBackward(bucket_bytes=0),
    "double_buffering": OneStepLate(),
    "hook": AfterBackward(send=lambda bucket: bucket.average()),
    "overlap, hook": DuringBackward(100, send=lambda bucket: bucket.average(bucket.flat)),
}
PLACES = ["own", "fortran", "reversed", "strided", "broadcast", "read-only", "shared", "overlapping", "missing"]


def pretend_two_nodes():
    mpi_comm = WORLD.Dup()
    with mock.patch.object(MPI, "Get_processor_name", lambda: f"node{RANK % 2}"):
        create_communicator("naive", mpi_comm)
    return mpi_comm


MPI_COMMS = {1: WORLD, 2: pretend_two_nodes()}


class Failure(Exception):
    pass


class Give(chainer.FunctionNode):
    """A function whose backward returns exactly the given arrays, or fails."""

    def __init__(self, arrays, fails):
        self.arrays, self.fails = arrays, fails

    def forward(self, inputs):
        return (np.zeros((), "f4"),)

    def backward(self, indexes, grads):
        if self.fails:
            raise Failure
        return tuple(None if array is None else chainer.Variable(array, requires_grad=False) for array in self.arrays)


class Recorder:
    """An optimizer that keeps a copy of its gradients."""

    target = None
    seen = None

    def setup(self, model):
        self.target = model

    def update(self, lossfun=None, *args):
        self.seen = [
            None if p.data is None or p.grad is None else p.grad.copy() for _, p in sorted(self.target.namedparams())
        ]


specs = st.lists(
    st.tuples(
        st.sampled_from([(), (0,), (1,), (3,), (3,), (2, 3), (2, 3), (40,), (5, 8), (2, 0), (130,)]),
        st.sampled_from(["f4", "f4", "f8", "f2"]),
    ),
    min_size=1,
    max_size=7,
)


@st.composite
def steps_of(draw, count, ranks):
    """Return what happens in a step: where each rank's gradients lie, and who fails before which function's backward.

    Gradients may be set by hand rather than by a backward pass; they may also be swapped gradients of the previous
    step.
    """
    failing = draw(st.lists(st.integers(0, ranks - 1), unique=True)) if draw(st.integers(0, 3)) == 0 else []
    return {
        "kind": draw(st.sampled_from(["loss", "loss", "hand", "exchanged"])),
        "places": [[draw(st.sampled_from(PLACES)) for _ in range(count)] for _ in range(ranks)],
        "fails at": {rank: draw(st.integers(0, count)) for rank in failing},
        "all fail": draw(st.booleans()),
        "groups": draw(st.integers(1, 3)),
    }


@st.composite
def examples(draw):
    shapes = draw(specs)
    return {
        "shapes": shapes,
        "name": draw(st.sampled_from(["naive", "flat", "hierarchical", "two_dimensional", "non_cuda_aware"])),
        "nodes": draw(st.sampled_from([1, 2])),
        "wire": draw(st.sampled_from([None, None, "float32", "float64", "float16"])),
        "scheme": draw(st.sampled_from(sorted(SCHEMES))),
        "is small": draw(st.booleans()),
        "steps": [draw(steps_of(len(shapes), SIZE)) for _ in range(draw(st.integers(1, 5)))],
    }


def gradients(shapes, places, step):
    """Return this rank's gradients, which may share memory."""
    random = np.random.RandomState(1000 * step + RANK)
    arrays = []
    for (shape, dtype), place in zip(shapes, places, strict=True):
        values = np.asarray(random.randint(-8, 9, shape), dtype)
        arrays.append(lay_out(values, place, [array for array in arrays if array is not None and array.dtype == dtype]))
    return arrays


def lay_out(values, place, others):
    """Return an array like ``values`` in a given place in memory, maybe within other arrays of the same dtype."""
    if place == "missing":
        return None
    if place == "read-only":
        values.flags.writeable = False
    if place == "fortran":
        return values.copy(order="F")
    if place == "broadcast":
        return np.broadcast_to(np.asarray(values.flat[0] if values.size else 0, values.dtype), values.shape)
    if values.ndim and place in ("reversed", "strided"):
        return values[::-1] if place == "reversed" else np.repeat(values, 2, axis=0)[::2]
    alike = [array for array in others if array.shape == values.shape]
    if place == "shared" and alike:
        return alike[0]
    larger = [array.reshape(-1) for array in others if array.flags.c_contiguous and array.size > values.size > 0]
    if place == "overlapping" and larger:
        return larger[0][1 : 1 + values.size].reshape(values.shape)
    return values


def make_model(shapes):
    model = chainer.Link()
    with model.init_scope():
        for i, (shape, dtype) in enumerate(shapes):
            setattr(model, f"p{i}", chainer.Parameter(np.zeros(shape, dtype)))
        model.never = chainer.Parameter()  # not initialised
    return model


def loss_of(params, arrays, groups, fails_at):
    """Return a loss whose backward pass runs through some functions, and may fail before one of them."""
    loss = chainer.Variable(np.zeros((), "f4"))
    groups = min(groups, len(params))
    for group in range(groups):
        mine = range(group, len(params), groups)
        give = Give([arrays[i] for i in mine], fails_at is not None and fails_at % groups == group)
        loss = loss + give.apply([params[i] for i in mine])[0]
    return loss


def mean_of(arrays, shapes):
    """Return the mean of all ranks' arrays; a missing one counts as zeros."""
    mine = [
        np.zeros(shape, dtype) if array is None else array.copy()
        for array, (shape, dtype) in zip(arrays, shapes, strict=True)
    ]
    everyone = WORLD.allgather(mine)
    return [np.mean([each[i].astype("f8") for each in everyone], axis=0) for i in range(len(shapes))]


def check(found, expected):
    for actual, mean in zip(found, expected, strict=True):
        within = 2e-2 if actual.dtype == "f2" else 2e-3  # it may have been sent in half precision
        np.testing.assert_allclose(actual, mean, rtol=within, atol=8 * within)
    for other in WORLD.allgather([each.tobytes() for each in found]):
        assert other == [each.tobytes() for each in found]


class Training:
    """The objects of a script, and the expected values for the next step."""

    def __init__(self, example):
        self.shapes, self.scheme = example["shapes"], example["scheme"]
        when = SCHEMES[self.scheme]
        self.is_late = isinstance(when, OneStepLate)
        comm = create_communicator(example["name"], MPI_COMMS[example["nodes"]], example["wire"])
        self.model, self.recorder = make_model(self.shapes), Recorder()
        self.optimizer = MultiNodeOptimizer(self.recorder, comm, when)
        self.fills = self.optimizer.zero_fill
        self.optimizer.setup(self.model)
        self.optimizer.update()  # sends the parameters of rank 0 to all ranks
        self.params = [getattr(self.model, f"p{i}") for i in range(len(self.shapes))]
        self.expected = None

    def step(self, number, step):
        fails_at = step["fails at"] if step["kind"] == "loss" else {}
        if fails_at and (step["all fail"] or "overlap" not in self.scheme):
            fails_at = {rank: fails_at.get(rank, 0) for rank in range(SIZE)}
        arrays = self.gradients(number, step)
        means = mean_of(arrays, self.shapes)
        self.recorder.seen = None
        try:
            if step["kind"] == "loss":
                self.optimizer.update(loss_of, self.params, arrays, step["groups"], fails_at.get(RANK))
            else:
                for param, array in zip(self.params, arrays, strict=True):
                    param.grad = array
                self.optimizer.update()
        except Failure:
            assert RANK in fails_at
        except RuntimeError as error:
            assert fails_at
            assert RANK not in fails_at
            assert "Failure" in str(error) or "has abandoned its backward pass" in str(error)
        else:
            assert not fails_at
            self.check(means, arrays)

    def gradients(self, number, step):
        """Return this rank's gradients, maybe those of the previous step, now assigned to other parameters."""
        if step["kind"] == "exchanged" and number and not self.is_late:
            grads = [param.grad for param in self.params]
            for spec in dict.fromkeys(self.shapes):
                alike = [i for i, each in enumerate(self.shapes) if each == spec]
                for i, j in zip(alike, alike[1:] + alike[:1], strict=True):
                    grads[i] = self.params[j].grad
            for i, grad in enumerate(grads):
                if RANK == 0 and grad is not None and grad.flags.writeable:
                    grad += grad.dtype.type(i)
            return grads
        places = step["places"][RANK]
        if not self.fills:  # then the same ones are missing on every rank
            firsts = ["missing" if first == "missing" else "" for first in step["places"][0]]
            places = [first or place.replace("missing", "own") for first, place in zip(firsts, places, strict=True)]
        return gradients(self.shapes, places, number)

    def check(self, means, arrays):
        present = [self.fills or array is not None for array in arrays]
        means = [mean for mean, is_there in zip(means, present, strict=True) if is_there]
        if self.is_late:
            self.expected, means = means, self.expected
        if means is None:
            assert self.recorder.seen is None
            return
        check([grad for grad in self.recorder.seen if grad is not None], means)


def run(example):
    sizes = (48, 160, 200, 64, 24) if example["is small"] else (1 << 18, 1 << 22, 1 << 22, 1 << 18, 1 << 14)
    limits = {"_BUCKET_BYTES": sizes[2], "_BUCKET_BYTES_ACROSS": sizes[2]}
    cuts = {"_BLOCK_BYTES": sizes[3], "_LARGE_BYTES": sizes[4]}
    with (
        mock.patch.object(share_size, "SHARE_BYTES", sizes[:2]),
        mock.patch.multiple(strategy, **limits),
        mock.patch.multiple(blocks, **cuts),
    ):
        training = Training(example)
        for number, step in enumerate(example["steps"]):
            training.step(number, step)


@settings(
    max_examples=int(os.environ.get("EXAMPLES", "100")),
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
    report_multiple_bugs=False,
)
@given(examples())
def run_all(example):
    try:
        run(example)
    except Exception:  # hypothesis would repeat it on this rank only
        traceback.print_exc()
        print(f"rank {RANK}: {example}", file=sys.stderr, flush=True)
        WORLD.Abort(1)


def test_random_models():
    run_all()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < 200
