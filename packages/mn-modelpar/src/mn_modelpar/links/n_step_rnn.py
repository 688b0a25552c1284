"""Stacked recurrent networks whose hidden states are sent between ranks."""

from __future__ import annotations

from typing import Any

import chainer
from chainer.links.rnn.n_step_rnn import NStepRNNBase

from mn_comm import CommunicatorBase
from mn_modelpar import functions
from mn_modelpar.functions.pseudo_connect import connect
from mn_modelpar.links.copying import deepcopy_sharing
from mn_modelpar.staging import put_on


def create_multi_node_n_step_rnn(
    actual_link: chainer.Link, communicator: CommunicatorBase, rank_in: int | None = None, rank_out: int | None = None
) -> chainer.Chain:
    """Make a stacked recurrent network receive initial hidden states from a rank, and send final ones to a rank.

    Each state is a separate message, in the order in which the network takes and returns them, so the other rank may
    also use plain calls of ``send`` and ``recv``, one for each state.

    Args:
        actual_link: One of Chainer's ``NStepLSTM``, ``NStepGRU``, ``NStepRNNTanh``, ``NStepRNNReLU``, or their
            bidirectional variants.
        communicator: The ranks that the network spans.
        rank_in: The rank to receive the initial hidden states from; ``None`` if they are zeros.
        rank_out: The rank to send the final hidden states to; ``None`` if they stay here.

    Returns:
        A link that is called with the list of input sequences, each of shape ``(length, in_size)``. It returns the
        results of ``actual_link`` and an additional value: the delegate variable of the states that were sent, which
        the backward pass must reach, or ``None`` if nothing was sent.

    Raises:
        ValueError: ``actual_link`` is something else.

    Example:
        >>> rank_in, rank_out = (None, 1) if comm.rank == 0 else (0, None)
        >>> rnn = L.NStepLSTM(n_layers=1, in_size=4, out_size=3, dropout=0)
        >>> rnn = chainermn.links.create_multi_node_n_step_rnn(rnn, comm, rank_in, rank_out)
        >>> with chainer.no_backprop_mode():
        ...     h, c, ys, delegate = rnn([np.ones((5, 4), np.float32)])
        >>> ys[0].shape
        (5, 3)
    """
    if not isinstance(actual_link, NStepRNNBase):
        raise ValueError(  # noqa: TRY004 - the type of error that scripts know
            f"expected one of Chainer's NStepRNN links for actual_link, got {type(actual_link).__name__}"
        )
    return MultiNodeNStepRNN(actual_link, communicator, rank_in, rank_out)


class MultiNodeNStepRNN(chainer.Chain):  # type: ignore[misc]  # Chainer has no types
    """See :func:`create_multi_node_n_step_rnn`."""

    def __init__(
        self, link: NStepRNNBase, communicator: CommunicatorBase, rank_in: int | None, rank_out: int | None
    ) -> None:
        super().__init__(actual_rnn=link)
        self.communicator = communicator
        self.rank_in = rank_in
        self.rank_out = rank_out
        self.n_cells = link.n_cells

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Receive the hidden states, run the network, send the hidden states; see the function that created this."""
        states: tuple[Any, ...] = (None,) * self.n_cells
        if self.rank_in is not None:
            received = [functions.recv(self.communicator, self.rank_in) for _ in range(self.n_cells)]
            states = tuple(put_on(self.device, state) for state in received)
        outputs = self.actual_rnn(*states, *inputs)
        delegate = None
        if self.rank_out is not None:
            for state in outputs[: self.n_cells]:
                # The backward pass that reaches the last message reaches those before it.
                (sent,) = (state,) if delegate is None else connect(delegate, state)
                delegate = functions.send(sent, self.communicator, self.rank_out)
        return (*outputs, delegate)

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiNodeNStepRNN:
        return deepcopy_sharing(self, self.communicator, memo)
