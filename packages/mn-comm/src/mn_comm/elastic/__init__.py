"""Communicators that survive the loss of a rank, using Open MPI's ULFM; see docs/decisions/0012-votes.md.

``change``: describes a loss. ``family``: the MPI communicators of one generation, and their votes. ``recovery``: from
    one generation to the next. ``communicator``: all of this in one object. ``ends``: how one rank ends.
"""
