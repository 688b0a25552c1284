import importlib.util
import sys
from pathlib import Path

import pytest

FAKES = Path(__file__).parent / "fakes"
# Shared by mn-comm and this package.
sys.path.insert(0, str(Path(__file__).parents[2] / "mn-comm" / "tests" / "fakes"))

from on_gpu import devices, make  # noqa: E402, F401
from shared_fixtures import comm, name, world  # noqa: E402, F401


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine for the doctor to check, which tests can break."""
    spec = importlib.util.spec_from_file_location("doctor_fakes", FAKES / "doctor_fakes.py")
    fakes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fakes)
    return fakes.Machine(tmp_path, monkeypatch)


@pytest.fixture
def run_bench(capfd, monkeypatch, world):  # noqa: F811
    """Return a function that runs the benchmark in this job, and returns the status and the output of rank 0."""
    from mn_tools.bench import command, main, measure

    # If there are more ranks than cores, each of these takes a time slice.
    for module, constant in [(command, "_LATENCY_ROUNDS"), (command, "_LATENCY_TOGETHER"), (measure, "_MOST_TOGETHER")]:
        monkeypatch.setattr(module, constant, 2)

    def run(*argv):
        status = main(list(argv))
        written = world.bcast(capfd.readouterr())
        assert set(world.allgather(status)) == {status}
        return status, *written

    return run
