"""Make the CuPy in an environment use an emulated GPU: ``python tools/gpu_emulator/build.py ENVIRONMENT``.

The environment is changed for good, so it must not be used for anything else, and its files must be copies rather than
links to a cache (``uv --link-mode=copy``). It holds ``cupy-cuda12x[ctk]``. Needs g++, uv, and a package index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = "libgpu_emulator.so"
# The names under which CuPy and nccl4py open the libraries that are emulated, for each major version of CUDA.
NAMES = {"12": ["libcuda.so.1", "libcublas.so.12", "libcurand.so.10", "libnccl.so.2"]}
VERSIONS = {"12": "12090"}
PROPERTIES = {"12": "cudaGetDeviceProperties_v2"}
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
    cuda = "12"
    work = environment / "gpu-emulator"
    work.joinpath("lib").mkdir(parents=True, exist_ok=True)
    version = run([str(python), "-c", f"import importlib.metadata as m; print(m.version('cupy-cuda{cuda}x'))"]).strip()
    tools = make_tools(work, python, cuda)
    headers = [f"-I{site}/nvidia/cuda_runtime/include", f"-I{work}/nvcc/nvidia/cuda_nvcc/include"]
    build_library(work, headers, cuda)
    build_runtime(work, tools, version, cuda, [*headers, f"-I{include}"], Path(site), suffix)
    package = Path(site) / "gpu_emulator"
    subprocess.run(["rm", "-rf", str(package)], check=True)
    subprocess.run(["cp", "-r", str(HERE / "python" / "gpu_emulator"), str(package)], check=True)
    start = Path(site) / "cupy" / "__init__.py"
    if HOOK not in start.read_text():
        start.write_text(start.read_text() + HOOK)


def run(command: list[str]) -> str:
    """Return the output of a command that must succeed."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def make_tools(work: Path, python: Path, cuda: str) -> Path:
    """Return the Python of an environment with Cython; fetch the headers of CUDA that its compiler needs."""
    tools = work / "tools" / "bin" / "python"
    if not tools.exists():
        run(["uv", "venv", "-q", "-p", str(python), str(work / "tools")])
        install = ["uv", "pip", "install", "-q", "-p", str(tools)]
        run([*install, "cython>=3,<4", "pip", "setuptools<81", "numpy"])
        run([*install, "--no-deps", "--target", str(work / "nvcc"), f"nvidia-cuda-nvcc-cu{cuda}"])
    return tools


def build_library(work: Path, headers: list[str], cuda: str) -> None:
    """Compile the emulator, and link the names of the libraries that it replaces to it."""
    defines = [f"-DGPU_EMULATOR_CUDA_VERSION={VERSIONS[cuda]}", f"-DGPU_EMULATOR_GET_PROPERTIES={PROPERTIES[cuda]}"]
    objects = []
    for source in sorted((HERE / "src").glob("*.cpp")):
        made = work / f"{source.stem}.o"
        objects.append(str(made))
        newest = max(source.stat().st_mtime, (HERE / "src" / "emulator.h").stat().st_mtime)
        if not made.exists() or made.stat().st_mtime < newest:
            run([*COMPILE, "-O2", *defines, *headers, "-c", str(source), "-o", str(made)])
    library = work / "lib" / LIBRARY
    run([*COMPILE, "-shared", *objects, "-o", str(library), f"-Wl,-soname,{LIBRARY}", "-lpthread", "-ldl"])
    for name in NAMES[cuda]:
        link = work / "lib" / name
        link.unlink(missing_ok=True)
        link.symlink_to(LIBRARY)


def build_runtime(
    work: Path, tools: Path, version: str, cuda: str, headers: list[str], site: Path, suffix: str
) -> None:
    """Replace CuPy's module ``runtime``, the only one with CUDA's runtime inside, by one that asks the emulator."""
    built = work / f"runtime-{version}.so"
    if not built.exists():
        source = work / f"cupy-{version}"
        if not source.exists():
            fetch_source(tools, version, work)
        settings = f"CUPY_USE_CUDA_PYTHON=False,CUPY_CUDA_VERSION={VERSIONS[cuda]},CUPY_HIP_VERSION=0"
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
