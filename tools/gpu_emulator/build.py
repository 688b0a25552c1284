"""Make the CuPy in an environment use an emulated GPU: ``python tools/gpu_emulator/build.py ENVIRONMENT``.

The environment is changed for good, so it must not be used for anything else, and its files must be copies rather than
links to a cache (``uv --link-mode=copy``). It contains CuPy for CUDA 12 or 13, SciPy, and the headers of CUDA's runtime
(``nvidia-cuda-runtime-cu12``, or ``nvidia-cuda-runtime`` of CUDA 13), but none of NVIDIA's libraries that are emulated:
some of them would be found first. Needs g++, uv, and a package index.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = "libgpu_emulator.so"


@dataclass(frozen=True)
class Cuda:
    """What differs between versions of CUDA.

    Attributes:
        version: Its number, as CUDA writes it.
        libraries: The names under which CuPy and nccl4py open the libraries that are emulated.
        headers: The folders with the headers of the runtime and of the compiler, in the folder ``nvidia`` of a wheel.
        compiler: The wheel with the headers of the compiler.
        properties: The name, in the library, of the function that returns the properties of a device.
    """

    version: str
    libraries: Sequence[str]
    headers: tuple[str, str]
    compiler: str
    properties: str


CUDA_12 = Cuda(
    "12090",
    [
        "libcuda.so.1",
        "libcublas.so.12",
        "libcublasLt.so.12",
        "libcufft.so.11",
        "libcurand.so.10",
        "libcusolver.so.11",
        "libcusparse.so.12",
        "libnccl.so.2",
        "libnvJitLink.so.12",
        "libnvrtc.so.12",
    ],
    ("cuda_runtime/include", "cuda_nvcc/include"),
    "nvidia-cuda-nvcc-cu12",
    "cudaGetDeviceProperties_v2",
)
CUDA_13 = Cuda(
    "13000",
    [
        "libcuda.so.1",
        "libcublas.so.13",
        "libcublasLt.so.13",
        "libcufft.so.12",
        "libcurand.so.10",
        "libcusolver.so.12",
        "libcusparse.so.12",
        "libnccl.so.2",
        "libnvJitLink.so.13",
        "libnvrtc.so.13",
    ],
    ("cu13/include", "cu13/include"),
    "nvidia-cuda-crt<14",
    "cudaGetDeviceProperties",
)
CUPY = {"cupy-cuda12x": CUDA_12, "cupy-cuda13x": CUDA_13}
# Of the functions that CuPy's modules link with, in libraries of which only a part is emulated.
PREFIXES = ("cublas", "cufft", "curand", "cusolver", "cusparse", "nccl", "nvrtc")
COMPILE = ["g++", "-std=c++17", "-mf16c", "-mavx", "-fPIC"]
HOOK = "\nimport gpu_emulator as _gpu_emulator\n_gpu_emulator.install()\n"


def main() -> None:
    """Build everything that is missing in the environment."""
    environment = Path(sys.argv[1]).resolve()
    python = environment / "bin" / "python"
    script = (
        "import sysconfig as s; print(s.get_path('purelib'), s.get_path('include'), s.get_config_var('EXT_SUFFIX'))"
    )
    site, include, suffix = run([str(python), "-c", script]).split()
    work = environment / "gpu-emulator"
    work.joinpath("lib").mkdir(parents=True, exist_ok=True)
    cuda, version = find_cupy(python)
    tools = make_tools(work, python, cuda)
    headers = [f"-I{folder}/nvidia/{part}" for folder, part in zip((site, work / "nvcc"), cuda.headers, strict=True)]
    build_library(work, headers, cuda, Path(site))
    build_runtime(work, tools, version, cuda, [*headers, f"-I{include}"], Path(site), suffix)
    package = Path(site) / "gpu_emulator"
    subprocess.run(["rm", "-rf", str(package)], check=True)
    subprocess.run(["cp", "-r", str(HERE / "python" / "gpu_emulator"), str(package)], check=True)
    run([str(python), "-c", "from gpu_emulator import compiler; compiler.prepare()"])
    start = Path(site) / "cupy" / "__init__.py"
    if HOOK not in start.read_text():
        start.write_text(start.read_text() + HOOK)


def run(command: list[str]) -> str:
    """Return the output of a command that must succeed."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def find_cupy(python: Path) -> tuple[Cuda, str]:
    """Return for which CUDA the CuPy of an environment is, and its version."""
    script = "import importlib.metadata as m; print(*(f'{d.name} {d.version}' for d in m.distributions()), sep='\\n')"
    installed = dict(line.split() for line in run([str(python), "-c", script]).splitlines())
    found = CUPY.keys() & installed.keys()
    if len(found) != 1:
        raise SystemExit(f"expected one of {', '.join(CUPY)} in the environment, got {sorted(found)}")
    name = found.pop()
    return CUPY[name], installed[name]


def make_tools(work: Path, python: Path, cuda: Cuda) -> Path:
    """Return the Python of an environment with Cython; fetch the headers of CUDA that its compiler needs."""
    tools = work / "tools" / "bin" / "python"
    if not tools.exists():
        run(["uv", "venv", "-q", "-p", str(python), str(work / "tools")])
        install = ["uv", "pip", "install", "-q", "-p", str(tools)]
        run([*install, "cython>=3,<4", "pip", "setuptools<81", "numpy"])
        run([*install, "--no-deps", "--target", str(work / "nvcc"), cuda.compiler])
    return tools


def build_library(work: Path, headers: list[str], cuda: Cuda, site: Path) -> None:
    """Compile the emulator, and link the names of the libraries that it replaces to it."""
    defines = [f"-DGPU_EMULATOR_CUDA_VERSION={cuda.version}", f"-DGPU_EMULATOR_GET_PROPERTIES={cuda.properties}"]
    sources = sorted((HERE / "src").glob("*.cpp"))
    objects = {source: work / f"{source.stem}.o" for source in sources}
    shared = max(header.stat().st_mtime for header in (HERE / "src").glob("*.h"))
    old = [
        source
        for source, made in objects.items()
        if not made.exists() or made.stat().st_mtime < max(source.stat().st_mtime, shared)
    ]
    compile_ = [*COMPILE, "-O2", *defines, *headers, f"-I{HERE}/src"]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: run([*compile_, "-c", str(source), "-o", str(objects[source])]), old))
    library = work / "lib" / LIBRARY
    link = [*COMPILE, "-shared", f"-Wl,-soname,{LIBRARY}", *map(str, objects.values())]
    missing = work / "missing.cpp"
    missing.write_text(name_missing(site, list(objects.values())))
    run([*link, f"-I{HERE}/src", str(missing), "-o", str(library), "-lpthread", "-ldl"])
    for name in cuda.libraries:
        made = work / "lib" / name
        made.unlink(missing_ok=True)
        made.symlink_to(LIBRARY)


def name_missing(site: Path, objects: list[Path]) -> str:
    """Return C++ with the functions that CuPy's modules need and the emulator lacks: calling one is a fault."""
    modules = [str(module) for name in ("cupy", "cupy_backends", "cupyx") for module in site.glob(f"{name}/**/*.so")]
    # With versions such as cublasCreate_v2@libcublas.so.12.
    needed = {name.partition("@")[0] for name in symbols(["-D", "--undefined-only", *modules])}
    found = set(symbols(["--defined-only", *map(str, objects)]))
    lines = [
        f'int {name}() {{ return emulator::unsupported("{name}", emulator::kNotSupported); }}'
        for name in sorted(needed - found)
        if name.startswith(PREFIXES)
    ]
    return "\n".join(['#include "emulator.h"', 'extern "C" {', *lines, "}", ""])


def symbols(options: list[str]) -> list[str]:
    """Return the names that nm prints."""
    lines = run(["nm", *options]).splitlines()
    return [line.split()[-1] for line in lines if line.strip() and not line.endswith(":")]


def build_runtime(
    work: Path, tools: Path, version: str, cuda: Cuda, headers: list[str], site: Path, suffix: str
) -> None:
    """Replace CuPy's module ``runtime``, the only one with CUDA's runtime inside, by one that asks the emulator."""
    built = work / f"runtime-{version}.so"
    if not built.exists():
        source = work / f"cupy-{version}"
        if not source.exists():
            fetch_source(tools, version, work)
        settings = f"CUPY_USE_CUDA_PYTHON=False,CUPY_CUDA_VERSION={cuda.version},CUPY_HIP_VERSION=0"
        cython = [str(tools), "-m", "cython", "-3", "--cplus", "-E", f"{settings},CUPY_CUFFT_STATIC=False"]
        module = "cupy_backends/cuda/api/runtime.pyx"
        subprocess.run(
            [*cython, "-X", "embedsignature=True", module, "-o", str(work / "runtime.cpp")],
            check=True, cwd=source, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        where = [f"-I{source}", f"-I{source}/cupy_backends/cuda/api", f"-I{HERE}/include", *headers]
        link = [f"-L{work}/lib", "-lgpu_emulator", f"-Wl,-rpath,{work}/lib"]
        run([*COMPILE, "-O1", "-w", "-shared", *where, str(work / "runtime.cpp"), "-o", str(built), *link])
    target = site / "cupy_backends" / "cuda" / "api" / f"runtime{suffix}"
    target.unlink()
    target.write_bytes(built.read_bytes())


def fetch_source(tools: Path, version: str, folder: Path) -> None:
    """Download CuPy's source distribution from pip's index; pip itself would try to build it."""

    def setting(name: str) -> str:
        found = subprocess.run(
            [str(tools), "-m", "pip", "config", "get", f"global.{name}"], capture_output=True, text=True
        )
        return os.environ.get("PIP_" + name.upper().replace("-", "_")) or found.stdout.strip()

    default = run([str(tools), "-c", "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"])
    page = (setting("index-url") or default.strip()).rstrip("/") + "/cupy/"
    if setting("cert"):
        os.environ["SSL_CERT_FILE"] = setting("cert")
    request = urllib.request.Request(page, headers={"Accept": "text/html"})
    text = urllib.request.urlopen(request).read().decode()
    found = re.search(rf'href="([^"]*cupy-{re.escape(version)}\.tar\.gz[^"]*)"', text)
    if found is None:
        sys.exit(f"expected cupy-{version}.tar.gz on {page}")
    archive = folder / f"cupy-{version}.tar.gz"
    urllib.request.urlretrieve(urllib.parse.urljoin(page, found[1].replace("&amp;", "&")), archive)
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")


if __name__ == "__main__":
    main()
