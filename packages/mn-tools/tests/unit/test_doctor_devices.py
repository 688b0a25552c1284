"""The doctor's checks of GPUs: with stand-ins for CuPy and nccl4py, and with parts of them missing."""

import json

import pytest

from mn_tools.doctor import commands, devices
from mn_tools.doctor.launch import Job
from mn_tools.doctor.options import Options

OPTIONS = Options(seconds=30)
CUPY = """
import types
__version__ = "14.0.1"
GPUS, DRIVER, RUNTIME = {gpus}, {driver}, {runtime}

class CUDARuntimeError(RuntimeError):
    pass

def count():
    if {error!r}:
        raise CUDARuntimeError({error!r})
    return GPUS

class Device:
    def __init__(self, number):
        self.pci_bus_id = f"0000:0{{number}}:00.0"

runtime = types.SimpleNamespace(
    runtimeGetVersion=lambda: RUNTIME,
    driverGetVersion=lambda: DRIVER,
    getDeviceCount=count,
    getDeviceProperties=lambda number: {{"name": b"H200", "major": {capability} // 10, "minor": {capability} % 10}},
)
cuda = types.SimpleNamespace(runtime=runtime, Device=Device)
"""
NCCL = """
import types

def get_version():
    version = types.SimpleNamespace(major=2, minor=30, micro=7)
    return types.SimpleNamespace(libnccl={library}, nccl_bindings=version)
"""


@pytest.fixture
def gpu(machine, monkeypatch, tmp_path):
    """Create a machine with GPUs, CuPy and NCCL."""
    monkeypatch.syspath_prepend(machine.site)
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  575.51.03  Mon\n")

    def make(
        gpus=2,
        driver=13000,
        runtime=12090,
        error="",
        kernel=True,
        capability=90,
        library="types.SimpleNamespace(version=version)",
    ):
        machine.module(
            "cupy/__init__", CUPY.format(gpus=gpus, driver=driver, runtime=runtime, error=error, capability=capability)
        )
        if library:
            machine.module("nccl/__init__", "")
            machine.module("nccl/core", NCCL.format(library=library))
        return list(devices.check(OPTIONS, tmp_path / ("driver" if kernel else "nothing")))

    return make


def codes(checks):
    return [check.code for check in checks]


def test_a_machine_with_gpus(gpu):
    cupy, driver, nccl = gpu()
    assert codes([cupy, driver, nccl]) == ["", "", ""]
    assert cupy.found == "14.0.1 for CUDA 12.9"
    assert (
        driver.found
        == "NVIDIA's driver 575.51.03, CUDA 13.0: H200 at 0000:00:00.0 (sm_90); H200 at 0000:01:00.0 (sm_90)"
    )
    assert nccl.found == "2.30.7"


@pytest.fixture
def no_cupy(monkeypatch):
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)


def test_gpus_without_cupy(tmp_path, no_cupy):
    (check,) = devices.check(OPTIONS, tmp_path)
    assert check.code == "gpu-without-cupy"


def test_neither_gpus_nor_cupy(tmp_path, no_cupy):
    (check,) = devices.check(OPTIONS, tmp_path / "nothing")
    assert check.code == ""
    assert "only be in host memory" in check.found


def test_cupy_twice(machine, gpu):
    machine.distribution("cupy-cuda12x", "14.0.1")
    machine.distribution("cupy_cuda13x".replace("_", "-"), "14.0.1")
    machine.distribution("cupyx-not-it", "1")
    (machine.site / "broken-1.dist-info").mkdir()
    check, *_ = gpu()
    assert check.code == "cupy-twice"
    assert check.found.endswith("cupy-cuda12x, cupy-cuda13x")


def test_cupy_that_cannot_be_imported(machine, gpu):
    gpu()
    machine.module("cupy/__init__", "raise ImportError('libnvrtc.so.12: cannot open')")
    (check,) = devices.check(OPTIONS)
    assert check.code == "cupy-broken"
    assert "libnvrtc.so.12" in check.found


def test_cupy_that_kills_the_process(machine, gpu):
    gpu()
    machine.module("cupy/__init__", "import os; os.abort()")
    (check,) = devices.check(OPTIONS)
    assert check.code == "cupy-broken"
    assert "SIGABRT" in check.found


@pytest.mark.parametrize("values", [{"gpus": 0}, {"error": "cudaErrorNoDevice: no CUDA-capable device is detected"}])
def test_cupy_without_a_gpu(gpu, values):
    _, check = gpu(**values)
    assert check.code == "cupy-without-device"


@pytest.mark.parametrize("error", ["", "cudaErrorInsufficientDriver: CUDA driver version is insufficient"])
def test_a_driver_that_is_too_old(gpu, error):
    check = gpu(driver=11080, error=error)[1]
    assert check.code == "driver-old"
    assert check.found == "it knows CUDA 11.8; CuPy is for CUDA 12.9"
    assert check.advice == "install NVIDIA's driver 525.60 or newer"


def test_a_driver_that_is_too_old_for_cuda_13_alone(gpu):
    check = gpu(driver=12040, runtime=13020)[1]
    assert check.code == "driver-old"
    assert check.advice == "install NVIDIA's driver 580.65 or newer, or the packages for CUDA 12: 'mn-comm[cuda12]'"


@pytest.mark.parametrize("runtime", [12090, 13020])
def test_cupy_without_a_driver(gpu, runtime):
    error = "cudaErrorInsufficientDriver: CUDA driver version is insufficient"
    check = gpu(driver=0, runtime=runtime, error=error, kernel=False)[1]
    assert check.code == "cupy-without-device"
    assert check.found == "CuPy finds no GPU: there is no driver"


def test_a_container_without_the_library_of_the_driver(gpu):
    check = gpu(driver=0, error="cudaErrorInsufficientDriver: CUDA driver version is insufficient")[1]
    assert check.code == "cupy-without-device"
    assert "libcuda.so.1 is missing, although there is NVIDIA's driver 575.51.03" in check.found


def test_a_gpu_that_cuda_13_has_dropped(gpu):
    check = gpu(driver=13000, runtime=13020, capability=70)[1]
    assert check.code == "gpu-too-old"
    assert "H200 at 0000:00:00.0 (sm_70)" in check.found
    assert "'mn-comm[cuda12]'" in check.advice


def test_an_old_gpu_with_cuda_12(gpu):
    assert gpu(driver=13000, capability=70)[1].code == ""


def test_no_binding_of_nccl(machine, gpu):
    machine.without_module("nccl")
    *_, check = gpu(library="")
    assert check.code == "nccl-missing"
    assert "nccl" in check.found


def test_no_library_of_nccl(gpu):
    *_, check = gpu(library="None")
    assert check.code == "nccl-missing"
    assert "libnccl.so.2" in check.found


def job(**found):
    steps = {"devices": [], "CUDA-aware": (False, False)} | found
    records = [{"pid": "a:1", "rank": 0, "step": step, "state": "end", "found": value} for step, value in steps.items()]
    out = "".join(f"{commands.MARK}{json.dumps(record)}\n" for record in records)
    return Job("Ranks", 2, ("mpiexec",), commands.Outcome(0, out, ""))


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        ([["a", ""], ["a", ""]], []),
        ([["a", "0"], ["a", "1"]], [""]),
        ([["a", "0"], ["b", "0"]], [""]),
        ([["a", "0"], ["a", "0"]], ["gpu-shared"]),
        ([["a", "0"], ["b", "0"], ["b", "1"], ["b", "0"]], ["gpu-shared"]),
    ],
)
def test_ranks_that_share_a_gpu(used, expected):
    checks = list(devices.check_sharing(job(devices=used)))
    assert codes(checks) == expected
    if expected == ["gpu-shared"]:
        assert "would share 0 of" in checks[0].found


@pytest.mark.parametrize(
    ("aware", "library_says_so", "expected"),
    [(True, True, ""), (False, True, ""), (False, False, ""), (True, False, "cuda-aware-claimed")],
)
def test_whether_mpi_takes_device_addresses(aware, library_says_so, expected):
    assert codes(devices.check_awareness(job(**{"CUDA-aware": (aware, library_says_so)}))) == [expected]
