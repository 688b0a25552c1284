"""Models that span ranks learn in the same way as in one process, step by step."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import mn_modelpar.functions as MF
from mn_comm import create_communicator
from mn_modelpar import MultiNodeChainList
from mn_modelpar.links import create_multi_node_n_step_rnn

pytestmark = pytest.mark.sizes(1, 4)

COMM = create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size
STEPS = 5


def dense(n_in, n_out, seed):
    return L.Linear(n_in, n_out, initialW=np.random.RandomState(seed).randn(n_out, n_in).astype("f") / 2)


def layers():
    return [dense(4, 8, 0), dense(8, 8, 1), dense(8, 3, 2)]


def batch(step, copy=0):
    random = np.random.RandomState(100 * step + copy)
    return random.randn(6, 4).astype("f"), random.randint(0, 3, 6).astype("i")


def losses_of(chain, loss_of):
    """Train in one process and return the loss of each step."""
    optimizer = chainer.optimizers.MomentumSGD(0.2).setup(chain)
    losses = []
    for step in range(STEPS):
        chain.cleargrads()
        loss = loss_of(step)
        loss.backward()
        optimizer.update()
        losses.append(float(loss.array))
    return losses


def scores(parts, x):
    return parts[2](F.tanh(parts[1](F.tanh(parts[0](x)))))


class Tanh(chainer.Chain):
    def __init__(self, layer):
        super().__init__(layer=layer)

    def forward(self, x):
        return F.tanh(self.layer(x))


def train_split(pair, copies, copy):
    """Train a perceptron split over a pair of ranks, averaged over copies; return the losses where they are known."""
    parts = layers()
    model = MultiNodeChainList(pair)
    if pair.rank == 0:
        model.add_link(Tanh(parts[0]), rank_out=1)
        model.add_link(parts[2], rank_in=1)
    else:
        model.add_link(Tanh(parts[1]), rank_in=0, rank_out=0)
    optimizer = chainer.optimizers.MomentumSGD(0.2).setup(model)
    losses = []
    for step in range(STEPS):
        x, t = batch(step, copy)
        model.cleargrads()
        if pair.rank == 0:
            loss = F.softmax_cross_entropy(model(x), t)
            losses.append(loss.array)
        else:
            loss = model()
        loss.backward()
        if copies is not None:
            copies.multi_node_mean_grad(model)
        optimizer.update()
    return losses


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks")
def test_model_parallel():
    pair = COMM.split(RANK // 2, RANK)
    if pair.size == 2:
        losses = train_split(pair, None, 0)
        parts = chainer.ChainList(*layers())
        expected = losses_of(parts, lambda step: F.softmax_cross_entropy(scores(parts, batch(step)[0]), batch(step)[1]))
        if losses:
            np.testing.assert_allclose(losses, expected, rtol=1e-5)
    pair.finalize()


@pytest.mark.skipif(SIZE < 4, reason="needs four ranks")
def test_dual_parallel():
    pair, copies = COMM.split(RANK // 2, RANK), COMM.split(RANK % 2, RANK)
    losses = train_split(pair, copies, RANK // 2)
    parts = chainer.ChainList(*layers())

    def both(step):
        return sum(F.softmax_cross_entropy(scores(parts, x), t) for x, t in (batch(step, 0), batch(step, 1))) / 2

    expected = losses_of(parts, both)
    if pair.rank == 0:
        np.testing.assert_allclose(copies.allreduce(np.array(losses)) / 2, expected, rtol=1e-5)
    pair.finalize()
    copies.finalize()


class Seq2Seq(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.encoder_embed, self.decoder_embed = L.EmbedID(5, 6), L.EmbedID(5, 6)
            self.encoder, self.decoder = L.NStepLSTM(2, 6, 7, 0.0), L.NStepLSTM(2, 6, 7, 0.0)
            self.words = dense(7, 5, 3)
        random = np.random.RandomState(4)
        for _, param in sorted(self.namedparams()):
            param.array = random.randn(*param.shape).astype("f") / 2

    def decode(self, hcy, ts):
        return F.softmax_cross_entropy(self.words(F.concat(hcy[2], axis=0)), np.concatenate(ts))


def sentences(step):
    random = np.random.RandomState(step)
    return tuple([random.randint(0, 5, n).astype("i") for n in lengths] for lengths in ((4, 2, 3), (3, 3, 1)))


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks")
def test_an_encoder_and_a_decoder_on_different_ranks():
    alone = Seq2Seq()

    def loss_of(step):
        xs, ts = sentences(step)
        h, c, _ = alone.encoder(None, None, [alone.encoder_embed(x) for x in xs])
        return alone.decode(alone.decoder(h, c, [alone.decoder_embed(t) for t in ts]), ts)

    expected = losses_of(alone, loss_of)
    if RANK > 1:
        return
    model = Seq2Seq()
    rnn = model.encoder if RANK == 0 else model.decoder
    rnn = create_multi_node_n_step_rnn(rnn, COMM, **({"rank_out": 1} if RANK == 0 else {"rank_in": 0}))

    def half(step):
        xs, ts = sentences(step)
        if RANK == 0:
            return rnn([model.encoder_embed(x) for x in xs])[-1]
        return model.decode(rnn([model.decoder_embed(t) for t in ts]), ts)

    optimizer = chainer.optimizers.MomentumSGD(0.2).setup(model)
    losses = []
    for step in range(STEPS):
        model.cleargrads()
        start = half(step)
        start.backward()
        optimizer.update()
        losses.append(start.array)
    if RANK == 1:
        np.testing.assert_allclose([float(loss) for loss in losses], expected, rtol=1e-5)


def test_channels_shared_out_among_ranks():
    alone = [np.random.RandomState(seed).randn(4, n_in, 3, 3).astype("f") / 4 for seed, n_in in enumerate((2, 4))]
    x = np.random.RandomState(9).randn(3, 2, 5, 5).astype("f")
    whole = chainer.ChainList(*(L.Convolution2D(w.shape[1], 4, 3, initialW=w) for w in alone))
    mine = slice(RANK * 4 // SIZE, (RANK + 1) * 4 // SIZE)
    part = chainer.ChainList(*(L.Convolution2D(w.shape[1], mine.stop - mine.start, 3, initialW=w[mine]) for w in alone))

    def forward(links, gather):
        h = x
        for link in links:
            h = gather(F.relu(link(h)))
        return F.sum(h**2)

    whole.cleargrads()
    part.cleargrads()
    expected = forward(whole, lambda h: h)
    expected.backward()
    loss = forward(part, lambda h: F.concat(MF.allgather(COMM, h), axis=1))
    np.testing.assert_allclose(loss.array, expected.array, rtol=1e-5)
    (loss / SIZE).backward()
    for ours, theirs in zip(part, whole, strict=True):
        np.testing.assert_allclose(ours.W.grad, theirs.W.grad[mine], rtol=1e-3, atol=1e-4)
