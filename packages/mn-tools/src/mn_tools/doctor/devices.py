"""GPUs: CuPy, the driver, NCCL, whether ranks would share a GPU, and whether MPI is CUDA-aware."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mn_tools.doctor import commands, inventory
from mn_tools.doctor.launch import Job
from mn_tools.doctor.options import Options
from mn_tools.doctor.problems import problem
from mn_tools.doctor.report import Check, ok

GROUP = "GPU"
DRIVER = Path("/proc/driver/nvidia")
_TOO_OLD = "InsufficientDriver"
# The oldest driver of each CUDA that the extras of mn-comm support.
_DRIVERS = {12: "525.60", 13: "580.65"}
# The architectures for which CUDA 12 compiles, and CUDA 13 does not: Maxwell, Pascal and Volta.
_DROPPED = {"sm_50", "sm_52", "sm_53", "sm_60", "sm_61", "sm_62", "sm_70", "sm_72"}


def check(options: Options, driver: Path = DRIVER) -> Iterator[Check]:
    """Check CuPy, the driver and NCCL.

    Args:
        options: The time limit.
        driver: The file in which NVIDIA's driver reports its version.
    """
    here = _driver_version(driver)
    names = cupy_distributions()
    if len(names) > 1:
        yield problem("cupy-twice", GROUP, "CuPy", f"installed more than once: {', '.join(names)}")
    if importlib.util.find_spec("cupy") is None:
        if here:
            yield problem("gpu-without-cupy", GROUP, "CuPy", f"not installed, but this machine has {here}")
        else:
            found = "not installed, and there is no NVIDIA driver: arrays can only be in host memory"
            yield ok(GROUP, "CuPy", found)
        return
    outcome = commands.python("mn_tools.doctor.trials", options.seconds, "find_devices")
    seen = outcome.facts()
    if "cupy" not in seen:
        found = seen.get("cupy_error", outcome.described())
        yield problem("cupy-broken", GROUP, "CuPy", f"it cannot be imported: {found}")
        return
    yield ok(GROUP, "CuPy", f"{seen['cupy']} for CUDA {_cuda(seen['runtime'])}")
    yield _judge_devices(seen, here, outcome)
    if seen.get("devices"):
        yield _judge_nccl(seen, outcome)


def cupy_distributions() -> list[str]:
    """Return the installed distributions that contain CuPy."""
    names = {name for name, _ in inventory.distributions()}
    return sorted(name for name in names if re.fullmatch(r"cupy(-cuda\w+|-rocm-[\w-]+)?", name))


def _judge_devices(seen: dict[str, Any], driver: str, outcome: commands.Outcome) -> Check:
    error, version, runtime = seen.get("device_error", ""), seen.get("driver", 0), seen["runtime"]
    if version and (version // 1000 < runtime // 1000 or _TOO_OLD in error):
        return _old_driver(version, runtime)
    if not version and not seen.get("devices"):
        # CuPy can be imported without a driver, and then calls it too old.
        error = f"the library libcuda.so.1 is missing, although there is {driver}" if driver else "there is no driver"
    if not seen.get("devices"):
        ended = "" if "devices" in seen else outcome.described()
        return problem("cupy-without-device", GROUP, "driver", f"CuPy finds no GPU: {error or ended or 'none visible'}")
    devices = [f"{name} ({architecture})" for name, architecture in seen["devices"]]
    if runtime // 1000 >= 13 and any(architecture in _DROPPED for _, architecture in seen["devices"]):
        return problem("gpu-too-old", GROUP, "driver", f"CUDA 13 compiles nothing for some of {'; '.join(devices)}")
    return ok(GROUP, "driver", f"{driver or 'driver'}, CUDA {_cuda(version)}: {'; '.join(devices)}")


def _old_driver(version: int, runtime: int) -> Check:
    major, known = runtime // 1000, version // 1000
    advice = f"install NVIDIA's driver {_DRIVERS.get(major, '')} or newer".replace("  ", " ")
    if known in _DRIVERS:
        advice += f", or the packages for CUDA {known}: 'mn-comm[cuda{known}]'"
    found = f"it knows CUDA {_cuda(version)}; CuPy is for CUDA {_cuda(runtime)}"
    return problem("driver-old", GROUP, "driver", found, advice=advice)


def _judge_nccl(seen: dict[str, Any], outcome: commands.Outcome) -> Check:
    version = seen.get("nccl", 0)
    if version:
        return ok(GROUP, "NCCL", f"{version // 10000}.{version // 100 % 100}.{version % 100}")
    missing = "libnccl.so.2 is missing" if "nccl" in seen else outcome.described()
    return problem("nccl-missing", GROUP, "NCCL", str(seen.get("nccl_error", missing)))


def check_sharing(job: Job) -> Iterator[Check]:
    """Check whether two ranks of a job would use the same GPU; no result if there is no GPU."""
    used: Sequence[Sequence[str]] = job.found("devices") or []
    by_device: dict[tuple[str, str], list[int]] = {}
    for rank, (host, device) in enumerate(used):
        if device:
            by_device.setdefault((host, device), []).append(rank)
    if not by_device:
        return
    shared = {place: ranks for place, ranks in by_device.items() if len(ranks) > 1}
    if shared:
        (host, device), ranks = next(iter(shared.items()))
        found = f"ranks {', '.join(map(str, ranks))} would share {device} of {host}, which NCCL refuses"
        yield problem("gpu-shared", GROUP, "ranks and GPUs", found)
    else:
        yield ok(GROUP, "ranks and GPUs", f"{len(used)} ranks, each with its own GPU")


def check_awareness(job: Job) -> Iterator[Check]:
    """Check whether MPI accepts device addresses; no result if the job did not get that far."""
    error, found = job.error("CUDA-aware"), job.found("CUDA-aware")
    if error:
        yield problem("cuda-aware-setting", GROUP, "CUDA-aware MPI", error)
    elif found is not None:
        aware, library_says_so = found
        if aware and not library_says_so:
            claim = "MN_COMM_CUDA_AWARE_MPI says yes, but the library does not"
            yield problem("cuda-aware-claimed", GROUP, "CUDA-aware MPI", claim)
        else:
            sent = "yes" if aware else "no: data on a GPU are sent through pinned host memory"
            yield ok(GROUP, "CUDA-aware MPI", sent)


def _driver_version(folder: Path) -> str:
    """Return the version that the driver reports; empty if there is no driver."""
    try:
        text = (folder / "version").read_text()
    except OSError:
        return "an NVIDIA driver" if folder.is_dir() else ""
    match = re.search(r"Module.*?(\d+\.\d+(\.\d+)?)", text)
    return f"NVIDIA's driver {match[1]}" if match else "an NVIDIA driver"


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
