"""``python -m chainermn_meta doctor``: the same as ``python -m chainermn doctor``, whoever owns that name here."""

import sys

from chainermn_meta.doctor import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
