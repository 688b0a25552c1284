"""The gradient's way through a communicator: select, agree, pack, average, view.

Read the modules in that order: :mod:`~mn_comm.gradients.select`, :mod:`~mn_comm.gradients.agree`,
:mod:`~mn_comm.gradients.bucket`; :mod:`~mn_comm.gradients.reducer` strings them together, and
:mod:`mn_comm.strategies` holds the ways to average.
"""

from mn_comm.gradients.reducer import GradientReducer

__all__ = ["GradientReducer"]
