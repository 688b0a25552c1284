import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mn_comm.collectives import pieces


@given(
    length=st.integers(0, 50),
    limit=st.integers(1, 64),
    dtype=st.sampled_from(["u1", "i2", "f4", "c16"]),
)
def test_pieces_cover_the_array_and_none_is_too_long(length, limit, dtype):
    flat = np.arange(length).astype(dtype)
    cut = list(pieces.pieces(flat, limit))
    assert all(0 < piece.nbytes <= max(limit, flat.itemsize) for piece in cut)
    assert all(np.shares_memory(piece, flat) for piece in cut)
    np.testing.assert_array_equal(np.concatenate(cut) if cut else flat[:0], flat)


def test_bytes_of_any_contiguous_array_are_a_view():
    for array in [
        np.zeros((2, 3), "f2"),
        np.zeros((), "c16"),
        np.zeros((0, 4)),
        np.zeros(2, "U3"),
        np.zeros(2, "i4,f8"),
    ]:
        flat = pieces.as_bytes(array)
        assert flat.shape == (array.nbytes,)
        assert array.size == 0 or np.shares_memory(flat, array)
