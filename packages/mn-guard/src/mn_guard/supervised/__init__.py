"""Jobs that are restarted by a supervisor when they fail; see docs/decisions/0014-a-keeper.md.

``start``: the first program of a rank, which becomes the script. ``link``: how a process connects to its keeper.
    ``keeper_process``: the process on a node that outlives the ranks. ``report``: what a rank reports to the keeper.
"""
