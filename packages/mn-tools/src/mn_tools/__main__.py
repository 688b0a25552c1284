"""``python -m mn_tools``: commands, each of which explains itself with ``--help``.

``doctor`` checks whether this machine, or a set of hosts, can run jobs, and says what to do if it cannot; ``bench``
measures the communicators, and recommends how to train a model; ``timeline`` adds the parts of ranks that could not
send them to rank 0 to a trace.
"""

import sys

from mn_comm.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "mn_tools"))
