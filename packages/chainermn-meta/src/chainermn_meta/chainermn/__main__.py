"""``python -m chainermn doctor``: see :mod:`chainermn_meta.doctor`."""

import sys

from chainermn_meta.doctor import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
