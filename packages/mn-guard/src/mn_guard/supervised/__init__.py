"""Jobs that are restarted by a supervisor when they fail; see docs/decisions/0014-a-keeper.md.

``start``: the first program of a rank, which becomes the script. ``link``: how a process finds the process of its node.
``report``: what a rank reports to it.
"""
