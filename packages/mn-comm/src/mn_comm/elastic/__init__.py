"""Communicators that survive the loss of a rank, by Open MPI's ULFM; see docs/decisions/0012-votes.md.

``change``: what a loss is told by. ``family``: the MPI communicators of one generation, and their votes. ``recovery``:
from one generation to the next. ``communicator``: all that in one object. ``ends``: how a rank ends alone.
"""
