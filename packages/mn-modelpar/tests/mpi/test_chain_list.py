import copy
from collections import defaultdict, namedtuple

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import mn_modelpar.functions as MF
from mn_comm import create_communicator
from mn_modelpar import MultiNodeChainList

COMM = create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size

needs = {n: pytest.mark.skipif(SIZE < n, reason=f"needs {n} ranks") for n in (2, 3, 4)}


class Dense(chainer.Chain):
    """A layer that adds up its inputs and returns one output, or a tuple of several."""

    def __init__(self, seed, outputs=1, used=True):
        super().__init__()
        random = np.random.RandomState(seed)
        self.used = used
        with self.init_scope():
            self.layers = L.Linear(4, 4 * outputs, initialW=random.randn(4 * outputs, 4) / 2, initial_bias=0.1)

    def forward(self, *inputs):
        flat = [x for given in inputs for x in (given if isinstance(given, tuple) else (given,))]
        h = self.layers(sum(flat) if self.used else np.ones((3, 4)))
        ys = F.split_axis(F.tanh(h), h.shape[1] // 4, axis=1, force_tuple=True)
        return ys[0] if len(ys) == 1 else ys


@pytest.fixture(autouse=True)
def double_precision():
    with chainer.using_config("dtype", np.float64):
        yield


X = np.random.RandomState(7).randn(3, 4)


def run(layout):
    """Run a model on several ranks: ``{rank: [(link, rank_in, rank_out), ...]}``; return the result of each rank."""
    if RANK not in layout:
        return None, None, []
    model = MultiNodeChainList(COMM)
    for link, rank_in, rank_out in layout[RANK]:
        model.add_link(link, rank_in=rank_in, rank_out=rank_out)
    model.cleargrads()
    x = chainer.Variable(X.copy())
    y = model(x) if any(rank_in is None for _, rank_in, _ in layout[RANK]) else model()
    has_output = any(rank_out is None for _, _, rank_out in layout[RANK])
    if has_output:
        loss = sum(F.sum((i + 1) * out**2) for i, out in enumerate(y if isinstance(y, tuple) else (y,)))
        loss.backward()
    else:
        y.backward()
    return x, y, [link for link, _, _ in layout[RANK]]


def check(layout, alone):
    """Compare with ``alone(x, links)``, which returns the outputs of the whole model in one process, and its loss."""
    x, y, mine = run(layout())
    everything = {rank: [link for link, _, _ in parts] for rank, parts in layout().items()}
    x_alone = chainer.Variable(X.copy())
    outputs, loss = alone(x_alone, everything)
    for links in everything.values():
        for link in links:
            link.cleargrads()
    loss.backward()
    if x is None:
        return
    if RANK in outputs:
        for got, expected in zip(_tuple(y), _tuple(outputs[RANK]), strict=True):
            np.testing.assert_allclose(got.array, expected.array, rtol=1e-12)
    for link, expected in zip(mine, everything[RANK], strict=True):
        if expected.layers.W.grad is None:
            assert link.layers.W.grad is None or not link.layers.W.grad.any()
        else:
            np.testing.assert_allclose(link.layers.W.grad, expected.layers.W.grad, rtol=1e-9, atol=1e-12)


def _tuple(y):
    return y if isinstance(y, tuple) else (y,)


def test_one_link_alone():
    def alone(x, links):
        y = links[RANK][0](x)
        return {RANK: y}, F.sum(y**2)

    check(lambda: {rank: [(Dense(rank), None, None)] for rank in range(SIZE)}, alone)


@needs[2]
def test_the_input_on_one_rank_and_the_output_on_the_next():
    def alone(x, links):
        y = links[1][0](links[0][0](x))
        return {1: y}, F.sum(y**2)

    check(lambda: {0: [(Dense(0), None, 1)], 1: [(Dense(1), 0, None)]}, alone)


@needs[2]
def test_there_and_back():
    def alone(x, links):
        y = links[0][1](links[1][0](links[0][0](x)))
        return {0: y}, F.sum(y**2)

    check(lambda: {0: [(Dense(0), None, 1), (Dense(1), 1, None)], 1: [(Dense(2), 0, 0)]}, alone)


@needs[2]
def test_a_tuple():
    def alone(x, links):
        y = links[1][0](links[0][0](x))
        return {1: y}, F.sum(y**2)

    check(lambda: {0: [(Dense(0, outputs=2), None, 1)], 1: [(Dense(1), 0, None)]}, alone)


@needs[2]
def test_the_output_of_the_model_before_its_last_link():
    def alone(x, links):
        y = links[0][0](links[1][0](x))
        z = links[1][1](links[0][1](x))
        return {0: y, 1: z}, F.sum(y**2) + F.sum(z**2)

    check(
        lambda: {
            0: [(Dense(0), 1, None), (Dense(1), None, 1)],
            1: [(Dense(2), None, 0), (Dense(3), 0, None)],
        },
        alone,
    )


@needs[2]
def test_several_outputs_of_the_model():
    def alone(x, links):
        ys = links[1][0](links[0][0](x))
        return {1: ys}, F.sum(ys[0] ** 2) + 2 * F.sum(ys[1] ** 2)

    check(lambda: {0: [(Dense(0), None, 1)], 1: [(Dense(1, outputs=2), 0, None)]}, alone)


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_link_that_sends_to_its_own_rank(outputs):
    def alone(x, links):
        y = links[RANK][1](links[RANK][0](x))
        return {RANK: y}, F.sum(y**2)

    check(
        lambda: {rank: [(Dense(0, outputs), None, rank), (Dense(1), rank, None)] for rank in range(SIZE)},
        alone,
    )


@needs[2]
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_receiving_from_and_sending_to_this_rank_and_another(order):
    def alone(x, links):
        h = links[0][0](x)
        y = links[0][1](h + links[1][0](h))
        return {0: y}, F.sum(y**2)

    check(
        lambda: {0: [(Dense(0), None, order), (Dense(1), order, None)], 1: [(Dense(2), 0, 0)]},
        alone,
    )


@needs[2]
def test_an_input_that_a_link_does_not_use():
    def alone(x, links):
        h = links[0][0](x)
        y = links[1][0](h) + 0 * F.sum(h)
        return {1: y}, F.sum(y**2)

    check(lambda: {0: [(Dense(0), None, 1)], 1: [(Dense(1, used=False), 0, None)]}, alone)


@needs[3]
def test_branches_that_merge():
    def alone(x, links):
        h = links[0][0](x)
        y = links[0][1](links[1][0](h) + links[2][0](h))
        return {0: y}, F.sum(y**2)

    check(
        lambda: {
            0: [(Dense(0), None, [1, 2]), (Dense(1), [1, 2], None)],
            1: [(Dense(2), 0, 0)],
            2: [(Dense(3), 0, 0)],
        },
        alone,
    )


@needs[3]
def test_inputs_on_two_ranks_that_meet_on_a_third():
    def alone(x, links):
        y = links[2][0](links[0][0](x), links[1][0](x))
        return {2: y}, F.sum(y**2)

    check(
        lambda: {0: [(Dense(0), None, 2)], 1: [(Dense(1), None, 2)], 2: [(Dense(2), [0, 1], None)]},
        alone,
    )


@needs[4]
def test_a_diamond_over_four_ranks_that_crosses_itself():
    def alone(x, links):
        a = links[0][0](x)
        b, c = links[1][0](a), links[2][0](a)
        d = links[3][0](b, c)
        y = links[0][1](links[1][1](d, b))
        return {0: y}, F.sum(y**2)

    check(
        lambda: {
            0: [(Dense(0), None, [1, 2]), (Dense(1), 1, None)],
            1: [(Dense(2), 0, [3, 1]), (Dense(3), [3, 1], 0)],
            2: [(Dense(4), 0, 3)],
            3: [(Dense(5), [1, 2], 1)],
        },
        alone,
    )


@needs[2]
def test_integers_as_the_input_of_a_later_link():
    # No gradient is passed back through them; the backward pass must still reach the earlier link.
    class Words(chainer.Chain):
        def __init__(self):
            super().__init__(embed=L.EmbedID(5, 4, initialW=np.ones((5, 4))))

        def forward(self, x):
            return self.embed(np.arange(3))

    if RANK == 0:
        model = MultiNodeChainList(COMM)
        model.add_link(Dense(0), rank_in=None, rank_out=1)
        model.add_link(Words(), rank_in=None, rank_out=None)
        model.cleargrads()
        F.sum(model(X)).backward()
        assert model[0].layers.W.grad is not None
        assert abs(model[0].layers.W.grad).sum() > 0
    elif RANK == 1:
        model = MultiNodeChainList(COMM)
        model.add_link(Dense(1), rank_in=0, rank_out=None)
        F.sum(model()).backward()


@needs[2]
def test_beside_plain_functions():
    if RANK == 0:
        model = MultiNodeChainList(COMM)
        model.add_link(Dense(0), rank_in=None, rank_out=1)
        model.cleargrads()
        model(X).backward()
        assert model[0].layers.W.grad is not None
    elif RANK == 1:
        F.sum(MF.recv(COMM, 0)).backward()


def test_copies_share_the_communicator():
    model = MultiNodeChainList(COMM)
    model.add_link(Dense(0))
    twin = copy.deepcopy(model)
    twin[0].layers.W.array[...] = 0
    assert model[0].layers.W.array.any()
    assert twin(X).shape == model.copy()(X).shape == (3, 4)


def test_mistakes_in_the_layout():
    model = MultiNodeChainList(COMM)
    model.add_link(Dense(0), rank_in=None, rank_out=None)
    with pytest.raises(ValueError, match="at most one link with rank_out=None"):
        model.add_link(Dense(0), rank_in=0, rank_out=None)
    with pytest.raises(ValueError, match=rf"expected rank_out in 0\.\.{SIZE - 1}, got {SIZE}"):
        model.add_link(Dense(0), rank_out=[0, SIZE])
    with pytest.raises(TypeError, match="expected an integer, a list of integers or None for rank_in, got 'x'"):
        model.add_link(Dense(0), rank_in="x")
    assert len(model) == 1


def test_what_is_sent_to_this_rank_must_be_received():
    model = MultiNodeChainList(COMM)
    model.add_link(Dense(0), rank_out=RANK)
    with pytest.raises(ValueError, match="1 outputs were sent to this rank itself, but no link receives them"):
        model(X)
    model = MultiNodeChainList(COMM)
    model.add_link(Dense(0), rank_in=RANK)
    with pytest.raises(ValueError, match=r"link 0 \(Dense, rank_in=.*expected an earlier link to have sent something"):
        model()


def test_a_link_that_returns_no_variable():
    class Nothing(chainer.Link):
        def forward(self, x):
            return None

    model = MultiNodeChainList(COMM)
    model.add_link(Nothing())
    with pytest.raises(TypeError, match=r"link 0 \(Nothing, .*expected it to return chainer.Variables .*got None"):
        model(X)


Pair = namedtuple("Pair", "y more")


class Returns(chainer.Chain):
    """A layer that wraps its output."""

    def __init__(self, seed, dress):
        super().__init__(layer=Dense(seed))
        self.dress = dress

    def forward(self, *xs):
        return self.dress(self.layer(*xs))


def model_of(*parts):
    model = MultiNodeChainList(COMM)
    for link, rank_in, rank_out in parts:
        model.add_link(link, rank_in=rank_in, rank_out=rank_out)
    model.cleargrads()
    return model


@needs[2]
@pytest.mark.parametrize(
    ("dress", "undress"),
    [
        (lambda y: {"y": y, "mask": y.array > 0}, lambda out: out["y"]),
        (lambda y: (y, {"twice": [2 * y]}), lambda out: out[1]["twice"][0] / 2),
        (lambda y: ({"n": np.arange(2)}, y.array, y), lambda out: out[2]),
        (lambda y: Pair(y, defaultdict(list, n=y)), lambda out: out.y * 2 - out.more["n"]),
    ],
    ids=["dict", "dict in a tuple", "arrays beside", "kinds of their own"],
)
def test_an_output_of_dicts_and_arrays(dress, undress):
    if RANK == 0:
        # The output of the model comes first, so it is joined to the values that are sent later.
        model = model_of((Returns(0, dress), None, None), (Dense(1), None, 1))
        out = model(X)
        F.sum(undress(out) ** 2).backward()
        assert isinstance(out, dict | tuple)
        assert all(link.W.grad.any() for link in (model[0].layer.layers, model[1].layers))
        if isinstance(out, dict):
            assert type(out["mask"]) is np.ndarray
    elif RANK == 1:
        model = model_of((Returns(2, dress), 0, None))
        F.sum(undress(model()) ** 2).backward()
        assert model[0].layer.layers.W.grad.any()


def test_a_model_that_returns_arrays_alone():
    model = model_of((Returns(0, lambda y: y.array), None, None))
    assert type(model(X)) is np.ndarray


@needs[2]
@pytest.mark.parametrize("dress", [lambda y: y.array, lambda y: (np.arange(3), y.array), lambda y: (y.array, y)])
def test_arrays_are_sent_as_they_are(dress):
    # Arrays get no gradient, but links before them are still reached, and no rank waits.
    if RANK == 0:
        model = model_of((Dense(0), None, 1), (Returns(1, dress), 1, 1), (Dense(2), 1, None))
        F.sum(model(X) ** 2).backward()
        assert model[2].layers.W.grad.any()
        assert model[0].layers.W.grad is not None
    elif RANK == 1:
        model = model_of((Dense(3), 0, 0), (Undressed(4), 0, 0))
        model().backward()
        assert model[1].layers.W.grad.any()


class Undressed(Dense):
    def forward(self, given):
        arrays = given if isinstance(given, tuple) else (given,)
        return super().forward(*(x for x in arrays if x.dtype.kind == "f"))


@needs[2]
def test_a_dict_cannot_be_sent_and_the_receiver_hears_of_it():
    if RANK == 0:
        with pytest.raises(TypeError, match=r"link 0 \(Returns, .*: expected a chainer.Variable, got dict"):
            model_of((Returns(0, lambda y: {"y": y}), None, 1))(X)
    elif RANK == 1:
        with pytest.raises(TypeError, match="on rank 0: send: expected"):
            model_of((Dense(0), 0, None))()


class Doubled(MultiNodeChainList):
    """As in scripts for the old software, where ``__call__`` ran the links."""

    def forward(self, x):
        return 2 * super().__call__(x)


class DoubledTwice(Doubled):
    def forward(self, x):
        return 2 * super().forward(x)


class Called(MultiNodeChainList):
    def __call__(self, x):
        return 3 * super().__call__(x)


@pytest.mark.parametrize(("kind", "factor"), [(Doubled, 2), (DoubledTwice, 4), (Called, 3)])
@pytest.mark.parametrize("method", ["__call__", "forward"])
def test_a_subclass_that_calls_what_it_is_derived_from(kind, factor, method):
    model = kind(COMM)
    model.add_link(Dense(0))
    expected = Dense(0)(X).array
    factor = 1 if (kind, method) == (Called, "forward") else factor
    for _ in range(2):
        np.testing.assert_allclose(getattr(model, method)(X).array, factor * expected)
