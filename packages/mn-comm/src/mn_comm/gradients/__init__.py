"""The gradient's way through a communicator: select, agree, pack, average, view.

Read the modules in that order: :mod:`~mn_comm.gradients.select`, :mod:`~mn_comm.gradients.agree`,
:mod:`~mn_comm.gradients.bucket` for packing and viewing, :mod:`~mn_comm.gradients.round`, which launches one bucket
after another, and :mod:`mn_comm.strategies` for the ways to average; :mod:`~mn_comm.gradients.reducer` keeps what lasts
from one backward pass to the next.
"""

from mn_comm.gradients.background import BackgroundReducer
from mn_comm.gradients.reducer import GradientReducer
from mn_comm.gradients.round import Round

__all__ = ["BackgroundReducer", "GradientReducer", "Round"]
