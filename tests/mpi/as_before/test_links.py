import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
import pytest
from chainermn.links import MultiNodeBatchNormalization, create_mnbn_model, create_multi_node_n_step_rnn

COMM = chainermn.create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size
NEXT, PREVIOUS = (RANK + 1) % SIZE, (RANK - 1) % SIZE

needs_two = pytest.mark.skipif(SIZE < 2, reason="needs two ranks")


def initial(seed, shape, dtype="f4"):
    return (np.random.RandomState(seed).randn(*shape) / 2).astype(dtype)


def compare(model, reference, rtol):
    params, expected = dict(model.namedparams()), dict(reference.namedparams())
    assert params.keys() == expected.keys()
    for name, param in params.items():
        np.testing.assert_allclose(param.grad, expected[name].grad, rtol=rtol, atol=rtol, err_msg=name)


class Net(chainer.Chain):
    """Layers with a normalization between them, of vectors or of pictures."""

    def __init__(self, normalization, dtype, pictures):
        super().__init__()
        layer = (lambda i, o: L.Convolution2D(i, o, 3, pad=1)) if pictures else L.Linear
        with chainer.using_config("dtype", dtype), self.init_scope():
            self.first, self.bn, self.last = layer(3, 4), normalization(), layer(4, 2)
        for i, (_, param) in enumerate(sorted(self.namedparams())):
            param.array = initial(i, param.shape, param.dtype)

    def forward(self, x):
        return self.last(F.relu(self.bn(self.first(x))))


OPTIONS = [{}, {"decay": 0.5, "eps": 1e-3}, {"use_gamma": False}, {"use_beta": False}]


@pytest.mark.parametrize("pictures", [False, True])
@pytest.mark.parametrize(("dtype", "rtol"), [("f8", 1e-8), ("f4", 1e-3)])
@pytest.mark.parametrize(
    ("how", "options"), [*(("link", each) for each in OPTIONS), ("model", {}), ("model", OPTIONS[1])]
)
def test_normalization_of_the_whole_batch(options, dtype, rtol, pictures, how):
    dtype = np.dtype(dtype).type
    options = {**options, "dtype": dtype}
    reference = Net(lambda: L.BatchNormalization(4, **options), dtype, pictures)
    if how == "link":
        model = Net(lambda: MultiNodeBatchNormalization(4, COMM, **options), dtype, pictures)
    else:
        model = create_mnbn_model(reference, COMM)
        assert type(model.bn) is MultiNodeBatchNormalization
    x = initial(99, (4 * SIZE, 3, *[5, 5][: 2 * pictures]), dtype)
    mine = x[4 * RANK : 4 * RANK + 4]
    for _ in range(2):
        model.cleargrads()
        reference.cleargrads()
        y, whole = model(mine), reference(x)
        np.testing.assert_allclose(y.array, whole.array[4 * RANK : 4 * RANK + 4], rtol=rtol, atol=rtol)
        F.mean_squared_error(y, np.ones_like(y.array)).backward()
        F.mean_squared_error(whole, np.ones_like(whole.array)).backward()
        COMM.multi_node_mean_grad(model)
        compare(model, reference, rtol)
        np.testing.assert_allclose(model.bn.avg_mean, reference.bn.avg_mean, rtol=1e-3, atol=1e-6)
    with chainer.using_config("train", False):
        assert model(mine).shape == y.shape


def test_other_links_stay_in_a_converted_model():
    class Block(chainer.ChainList):
        pass

    model = Block(
        L.Linear(2, 3), chainer.Sequential(L.BatchNormalization(3), F.relu), chainer.Chain(x=L.BatchNormalization(2))
    )
    converted = create_mnbn_model(model, COMM)
    assert type(converted) is Block
    kinds = [type(link) for link in converted.links()]
    assert kinds.count(MultiNodeBatchNormalization) == 2
    assert L.BatchNormalization not in kinds
    assert [name for name, _ in converted.namedparams()] == [name for name, _ in model.namedparams()]
    assert not any(isinstance(link, MultiNodeBatchNormalization) for link in model.links())


class Layer(chainer.Chain):
    """Adds up its arguments, and gives one output, or several as a tuple."""

    def __init__(self, seed, outputs=1):
        super().__init__(l=L.Linear(3, 3 * outputs, initialW=initial(seed, (3 * outputs, 3))))
        self.outputs = outputs

    def forward(self, *xs):
        flat = [x for given in xs for x in (given if isinstance(given, (tuple, list)) else [given])]
        y = F.tanh(self.l(sum(flat)))
        return y if self.outputs == 1 else F.split_axis(y, self.outputs, axis=1)


def model_of(*parts):
    model = chainermn.MultiNodeChainList(COMM)
    for link, rank_in, rank_out in parts:
        model.add_link(link, rank_in=rank_in, rank_out=rank_out)
    model.cleargrads()
    return model


def x_of(rank):
    return initial(50 + rank, (2, 3))


def check(model, parts_of, outputs_of, takes_input):
    """Compare with all links in one process; ``outputs_of`` has the output on every rank that has one."""
    y = model(x_of(RANK)) if takes_input else model()
    links = {rank: [link for link, _, _ in parts_of(rank)] for rank in range(SIZE)}
    for each in links.values():
        for link in each:
            link.cleargrads()
    outputs = outputs_of(links)
    sum(F.sum(out**2) for out in outputs.values()).backward()
    if RANK in outputs:
        np.testing.assert_allclose(y.array, outputs[RANK].array, rtol=1e-4, atol=1e-6)
        y = F.sum(y**2)
    y.backward()
    for link, expected in zip(model, links[RANK], strict=True):
        compare(link, expected, 1e-4)


@needs_two
@pytest.mark.parametrize("outputs", [1, 2])
def test_a_cycle_through_all_ranks(outputs):
    def parts(rank):
        if rank == 0:
            return [(Layer(0, outputs), None, 1), (Layer(100), SIZE - 1, None)]
        return [(Layer(rank, outputs if rank < SIZE - 1 else 1), rank - 1, (rank + 1) % SIZE)]

    def together(links):
        y = x_of(0)
        for rank in range(SIZE):
            y = links[rank][0](y)
        return {0: links[0][1](y)}

    check(model_of(*parts(RANK)), parts, together, RANK == 0)


@needs_two
def test_every_rank_crosses_to_the_next():
    def parts(rank):
        sends = Layer(rank), None, (rank + 1) % SIZE
        receives = Layer(10 + rank), (rank - 1) % SIZE, None
        # The old one waits in send until the receiver is ready, so not all ranks may begin with a send.
        return [receives, sends] if rank % 2 else [sends, receives]

    def together(links):
        def output(rank):
            before = (rank - 1) % SIZE
            return links[rank][1 - rank % 2](links[before][before % 2](x_of(before)))

        return {rank: output(rank) for rank in range(SIZE)}

    check(model_of(*parts(RANK)), parts, together, takes_input=True)


@needs_two
@pytest.mark.parametrize("outputs", [1, 3])
def test_branches_to_all_other_ranks_and_back(outputs):
    others = list(range(1, SIZE))

    def parts(rank):
        if rank == 0:
            return [(Layer(0, outputs), None, others), (Layer(100), others, None)]
        return [(Layer(rank), 0, 0)]

    def together(links):
        h = links[0][0](x_of(0))
        return {0: links[0][1](*(links[rank][0](h) for rank in others))}

    check(model_of(*parts(RANK)), parts, together, RANK == 0)


@needs_two
def test_inputs_on_all_ranks_that_meet_on_the_first():
    others = list(range(1, SIZE))

    def parts(rank):
        return [(Layer(0), others, None)] if rank == 0 else [(Layer(rank), None, 0)]

    def together(links):
        return {0: links[0][0](*(links[rank][0](x_of(rank)) for rank in others))}

    check(model_of(*parts(RANK)), parts, together, RANK != 0)


@needs_two
def test_twice_to_and_fro():
    def parts(rank):
        if rank == 0:
            return [(Layer(0), None, 1), (Layer(1), 1, 1), (Layer(2), 1, None)]
        return [(Layer(3), 0, 0), (Layer(4), 0, 0)] if rank == 1 else [(Layer(5), None, None)]

    def together(links):
        y = links[1][0](links[0][0](x_of(0)))
        y = links[0][2](links[1][1](links[0][1](y)))
        return {0: y, **{rank: links[rank][0](x_of(rank)) for rank in range(2, SIZE)}}

    check(model_of(*parts(RANK)), parts, together, RANK != 1)


class Recurrent(chainer.Chain):
    """A part of a recurrent network that continues on the next rank, with its own loss."""

    def __init__(self, kind, rank_in, rank_out):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(9, 3)
            self.rnn = create_multi_node_n_step_rnn(kind(2, 3, 4, 0), COMM, rank_in=rank_in, rank_out=rank_out)
            self.out = L.Linear(4, 3)

    def forward(self, words, t):
        *states, ys, delegate = self.rnn([self.embed(each) for each in words])
        h = F.sum(self.out(F.concat(ys, axis=0)), axis=0)
        (loss,) = chainermn.functions.pseudo_connect(delegate, F.mean_squared_error(h, t))
        return states, loss


@pytest.mark.parametrize("kinds", [("NStepLSTM",), ("NStepGRU", "NStepRNNTanh")])
def test_recurrent_networks_over_all_ranks(kinds):
    kind = getattr(L, kinds[RANK % len(kinds)])
    model = Recurrent(kind, None if RANK == 0 else RANK - 1, None if RANK == SIZE - 1 else RANK + 1)
    optimizer = chainer.optimizers.SGD(0.01).setup(model)
    random = np.random.RandomState(RANK)
    words = [random.randint(0, 9, n).astype("i4") for n in (4, 3, 1)]
    for _ in range(3):
        model.cleargrads()
        states, loss = model(words, np.ones(3, "f4"))
        assert [state.shape for state in states] == [(2, 3, 4)] * (2 if kind is L.NStepLSTM else 1)
        loss.backward()
        for name, param in model.namedparams():
            assert np.isfinite(param.grad).all(), name
            assert param.grad.any(), name
        optimizer.update()
