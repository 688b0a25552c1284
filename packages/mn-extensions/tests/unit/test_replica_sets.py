import pytest

import mn_extensions  # noqa: F401 - before Chainer
from mn_extensions.snapshot import parse_replica_sets


@pytest.mark.parametrize(
    ("sets", "size", "expected"),
    [
        ([], 4, [[0, 1, 2, 3]]),
        ([0], 4, [[0], [1, 2, 3]]),
        ([0], 1, [[0]]),
        ([0, 1], 4, [[0], [1], [2, 3]]),
        ([[0, 1], [2, 3]], 4, [[0, 1], [2, 3]]),
        ([range(0, 8, 2)], 8, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ([[0], range(1, 4)], 4, [[0], [1, 2, 3]]),
        ([(i for i in (2, 0))], 3, [[0, 2], [1]]),
    ],
)
def test_sets(sets, size, expected):
    assert parse_replica_sets(sets, size) == expected
