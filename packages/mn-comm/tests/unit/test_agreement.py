import pytest
from mpi4py import MPI

from mn_comm.ranks import agreement


def test_digest_fits_twice_into_an_int64_and_depends_on_everything():
    signatures = [(), (("a", (1,), "float32"),), (("a", (1,), "float64"),), (("a", (1, 1), "float32"),)]
    numbers = [agreement.digest(signature) for signature in signatures]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 2**62 for number in numbers)


def test_digest_does_not_depend_on_the_process():
    # Python's own hash() of a str would not: PYTHONHASHSEED differs between ranks.
    assert agreement.digest(("a",)) == 1568075525093275129


def test_errors_of_other_ranks_keep_a_common_type_and_name_the_rank():
    assert isinstance(agreement.remote_error(3, "TypeError", "bad"), TypeError)
    assert str(agreement.remote_error(3, "TypeError", "bad")) == "on rank 3: bad"
    other = agreement.remote_error(3, "PicklingError", "bad")
    assert type(other) is RuntimeError
    assert str(other) == "on rank 3: PicklingError: bad"


def test_an_error_is_described_by_the_nearest_type_that_every_rank_knows():
    assert agreement.describe(ConnectionResetError("no")) == ("ConnectionError", "no")
    assert agreement.describe(PermissionError("no")) == ("PermissionError", "no")
    assert agreement.describe(KeyError("no")) == ("KeyError", "'no'")
    assert agreement.describe(UnicodeError("no")) == ("ValueError", "no")
    assert agreement.describe(LookupError("no")) == ("LookupError", "no")


def test_a_rank_raises_its_own_exception_unchanged():
    error = LookupError("mine")
    with pytest.raises(LookupError) as caught, agreement.raise_on_all(MPI.COMM_SELF):
        raise error
    assert caught.value is error
