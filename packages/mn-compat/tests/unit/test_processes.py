"""Children of ``multiprocessing``: they start their own interpreter and must find Chainer patched."""

import pytest

from mn_compat.helpers import worker_error

SCRIPT = """
import multiprocessing, sys
import chainer
import numpy


def summarize(values):
    summary = chainer.Summary()
    for value in values:
        summary.add(value)
    return float(summary.compute_mean()), type(chainer.reporter.__loader__).__name__


if __name__ == "__main__":
    values = numpy.full(3000, 1.2, numpy.float16)
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        mean, loader = pool.apply(summarize, (values,))
    assert mean == float(values[0]), mean
    print(loader)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_children_are_patched(python, tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert python(script, method).stdout.strip() == "SubstitutingLoader"


@pytest.mark.parametrize(
    ("status", "how"), [(-9, "killed by SIGKILL, as"), (-11, "killed by SIGSEGV, so"), (-40, "killed by signal 40, so")]
)
def test_every_signal_that_ends_a_worker_is_described(status, how):
    assert f" was {how} " in worker_error._describe(7, status)
