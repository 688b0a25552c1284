"""Jobs that are started again by a supervisor when they fail; see docs/decisions/0014-a-keeper.md.

``link``: how a process reaches what supervises it. ``keeper_process``: the process of a node that outlives the ranks.
``report``: what a rank tells it. ``memory``: what it keeps for them.
"""
