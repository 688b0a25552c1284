import copy

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import mn_modelpar.functions as MF
from mn_comm import create_communicator
from mn_modelpar.links import create_multi_node_n_step_rnn

COMM = create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size

NAMES = [f"NStep{bi}{kind}" for bi in ("", "Bi") for kind in ("LSTM", "GRU", "RNNTanh", "RNNReLU")]


def network(name, rank):
    random = np.random.RandomState(rank)
    link = getattr(L, name)(2, 3, 4, 0.0)
    for _, param in sorted(link.namedparams()):
        param.array = random.randn(*param.shape) / 2
    link.cleargrads()
    return link


def sequences(rank):
    random = np.random.RandomState(100 + rank)
    return [random.randn(n, 3) for n in (5, 2, 3)]


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_travel_from_rank_to_rank(name):
    with chainer.using_config("dtype", np.float64):
        alone = [network(name, rank) for rank in range(SIZE)]
        states = (None,) * alone[0].n_cells
        expected = 0
        for rank, link in enumerate(alone):
            *states, ys = link(*states, sequences(rank))
            expected += (rank + 1) * sum(F.sum(y**2) for y in ys)
        expected.backward()

        rnn = network(name, RANK)
        link = create_multi_node_n_step_rnn(
            rnn, COMM, rank_in=RANK - 1 if RANK else None, rank_out=RANK + 1 if RANK < SIZE - 1 else None
        )
        *states, ys, delegate = link(sequences(RANK))
        assert len(states) == rnn.n_cells
        assert (delegate is None) == (RANK == SIZE - 1)
        loss = (RANK + 1) * sum(F.sum(y**2) for y in ys)
        total = COMM.allreduce(loss.array)
        np.testing.assert_allclose(total, expected.array, rtol=1e-10)
        (loss if delegate is None else MF.pseudo_connect(delegate, loss)).backward()
    for (key, param), (_, other) in zip(sorted(rnn.namedparams()), sorted(alone[RANK].namedparams()), strict=True):
        np.testing.assert_allclose(param.grad, other.grad, rtol=1e-8, atol=1e-10, err_msg=key)


@pytest.mark.skipif(SIZE < 2, reason="needs two ranks")
@pytest.mark.parametrize("name", ["NStepLSTM", "NStepGRU"])
def test_each_state_is_a_message(name):
    # Like counterparts written by hand, with the old software: one recv or send for each state.
    rnn = network(name, 0)
    shape = (2, 3, 4)  # layers, sequences, units
    with chainer.using_config("dtype", np.float64):
        if RANK == 0:
            *_, delegate = create_multi_node_n_step_rnn(rnn, COMM, rank_in=1, rank_out=1)(sequences(0))
            delegate.backward()
        elif RANK == 1:
            given = [chainer.Variable(np.full(shape, 0.1 * (i + 1))) for i in range(rnn.n_cells)]
            delegate = None
            for state in given:
                delegate = MF.send(state if delegate is None else MF.pseudo_connect(delegate, state)[0], COMM, 0)
            returned = []
            for _ in range(rnn.n_cells):
                returned.append(MF.recv(COMM, 0, delegate))
                delegate = returned[-1]
            assert [state.shape for state in returned] == [shape] * rnn.n_cells
            sum(F.sum((i + 1) * state) for i, state in enumerate(returned)).backward()
            alone = [chainer.Variable(state.array) for state in given]
            *expected, _ = rnn(*alone, sequences(0))
            sum(F.sum((i + 1) * state) for i, state in enumerate(expected)).backward()
            for state, other in zip(given, alone, strict=True):
                np.testing.assert_allclose(state.grad, other.grad, rtol=1e-8, atol=1e-10)


def test_only_recurrent_networks():
    with pytest.raises(ValueError, match="expected one of Chainer's NStepRNN links for actual_link, got Linear"):
        create_multi_node_n_step_rnn(L.Linear(2, 3), COMM)


def test_copies_share_the_communicator():
    link = create_multi_node_n_step_rnn(network("NStepGRU", 0), COMM)
    assert copy.deepcopy(link).communicator is COMM
