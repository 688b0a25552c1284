import pytest
from hypothesis import given
from hypothesis import strategies as st

from mn_data.plan import part


def parts(n, size, equal):
    return [part(n, size, rank, equal) for rank in range(size)]


@given(n=st.integers(0, 500), size=st.integers(1, 20))
def test_equal_parts(n, size):
    bounds = parts(n, size, True)
    assert {end - begin for begin, end in bounds} == {(n + size - 1) // size}
    assert {i for begin, end in bounds for i in range(begin, end)} == set(range(n))


@given(n=st.integers(0, 500), size=st.integers(1, 20))
def test_disjoint_parts(n, size):
    bounds = parts(n, size, False)
    assert [i for begin, end in bounds for i in range(begin, end)] == list(range(n))
    lengths = [end - begin for begin, end in bounds]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(("equal", "expected"), [(True, [(0, 4), (3, 7), (6, 10)]), (False, [(0, 4), (4, 7), (7, 10)])])
def test_ten_samples_over_three_ranks(equal, expected):
    assert parts(10, 3, equal) == expected
