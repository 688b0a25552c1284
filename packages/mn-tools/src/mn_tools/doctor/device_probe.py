"""Reports what CuPy and nccl4py find; runs in its own process."""

from __future__ import annotations

from typing import Any

from mn_tools.doctor.commands import emit, errors_as


def main() -> None:
    """Write versions and devices; each step is written as soon as it is done, because any step may end the process."""
    with errors_as("cupy_error"):
        import cupy

        runtime = cupy.cuda.runtime
        emit(cupy=str(cupy.__version__), runtime=int(runtime.runtimeGetVersion()))
        with errors_as("device_error"):
            emit(driver=int(runtime.driverGetVersion()))
            emit(devices=_devices(cupy))
        with errors_as("nccl_error"):
            from mn_comm.device import nccl

            emit(nccl=nccl.get_version())


def _devices(cupy: Any) -> list[tuple[str, str]]:
    runtime = cupy.cuda.runtime
    found = []
    for number in range(runtime.getDeviceCount()):
        properties = runtime.getDeviceProperties(number)
        name = properties["name"]
        name = name.decode() if isinstance(name, bytes) else str(name)
        architecture = f"sm_{properties['major']}{properties['minor']}"
        found.append((f"{name} at {cupy.cuda.Device(number).pci_bus_id}", architecture))
    return found


if __name__ == "__main__":
    main()
