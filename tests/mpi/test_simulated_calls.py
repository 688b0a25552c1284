"""The calls that benchmarks/simulation generates are those that mn_comm makes."""

import importlib
import itertools
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import mn_comm
from mn_compress import Int8

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
# More than a bucket of each kind; lengths that no number of ranks divides.
LENGTHS = [4_200_011, 13, 1]

pytestmark = [pytest.mark.sizes(4), pytest.mark.skipif(SIZE == 1, reason="one rank has no other nodes")]


class Param:
    def __init__(self, length):
        self.data = self.grad = np.zeros(length, np.float32)


class Model:
    def __init__(self):
        self.params = [(f"/{i}", Param(length)) for i, length in enumerate(LENGTHS)]

    def namedparams(self):
        return self.params


@pytest.fixture(scope="module")
def simulation():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("simulation.messages"), importlib.import_module("simulation.recorder")


@pytest.mark.parametrize(
    ("strategy", "compression"),
    [("naive", None), *itertools.product(["flat", "hierarchical", "two_dimensional"], [None, Int8()])],
)
@pytest.mark.parametrize("last", [0, 1, 2])
def test_generated_calls_are_those_of_a_real_run(simulation, strategy, compression, last):
    if last >= SIZE:
        pytest.skip(f"expected more than {last} ranks")
    messages, recorder = simulation
    hosts = [SIZE - last, last] if last else [1] * SIZE
    node = next(i for i in range(len(hosts)) if sum(hosts[: i + 1]) > RANK)
    with mock.patch.object(MPI, "Get_processor_name", lambda: f"node{node}"):
        comm = mn_comm.create_communicator(strategy, MPI.COMM_WORLD.Dup())
    reducer, model = comm.gradient_reducer(compression=compression), Model()
    for _ in range(2):  # buckets are created at first
        reducer.average(model)
    with recorder.record() as found:
        reducer.average(model)
    name = type(compression).__name__ if compression else ""
    expected = list(messages.calls(strategy, hosts, RANK, LENGTHS, name))
    comm.finalize()
    assert found == expected
