"""Every function of Chainer on the device gives the host's results, gradients, and gradients of gradients."""

import inspect

import pytest
from chainer import functions
from comparing import Case, compare
from function_cases import CASES

pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

LISTS = {name: [some] if isinstance(some, Case) else some for name, some in CASES.items()}
EACH = [
    pytest.param(name, one, dtype, id=f"{name}-{index}-{dtype}")
    for name, some in LISTS.items()
    for index, one in enumerate(some)
    for dtype in one.dtypes
]


@pytest.mark.filterwarnings("ignore:(batch_|fixed_batch_re)[a-z]+ is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("name", "case", "dtype"), EACH)
def test_device_and_host_agree(name, case, dtype):
    compare(name, case, dtype)


def test_every_function_is_compared():
    names = {name for name, found in vars(functions).items() if inspect.isfunction(found) and not name.startswith("_")}
    assert names == set(CASES)
