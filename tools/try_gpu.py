"""On a machine with GPUs: run everything that needs one, and write down what ran on what.

``python tools/try_gpu.py --ranks 2`` runs the doctor, all tests marked ``gpu`` of all packages and of ``tests/`` (in
one process, and those of jobs on two ranks), and the benchmarks of GPUs. It needs an environment with the packages, a
CuPy for the driver, and the tests' requirements; the ``mpiexec`` on PATH starts the jobs. The results are in
``result/gpu/``: ``README.md`` contains the tables, the other files what the tests wrote. The exit status is 1 if
something failed.

If there are fewer GPUs than ranks, ranks share one, which NCCL 2.30 and newer allow for tests.

With ``--emulated``, the device is one of ``tools/gpu_emulator``: its own tests run, too, and no benchmark.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import run_tests
from scheduling import HUNG, Record

ROOT = run_tests.ROOT
ALONE = "unit", "gpu", "jobs"  # parts of a folder of tests that run in one process
BENCHMARKS = "gpu", "gpu_compression"
BENCHMARK_LIMIT = 600  # seconds


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        what: What ran.
        passed: How many tests passed; of a program, 1 or 0.
        failed: How many failed.
        skipped: How many were skipped.
        seconds: How long it took.
    """

    what: str
    passed: int
    failed: int
    skipped: int
    seconds: float


def main() -> int:
    """Run everything, write the tables, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = "sizes of the jobs, separated by commas; other than 2 for files with the mark sizes; default %(default)s"
    parser.add_argument("--ranks", default="2", help=which)
    parser.add_argument("--out", type=Path, default=ROOT / "result" / "gpu")
    parser.add_argument("--only", default="", help="only tests whose file's path contains this")
    parser.add_argument("--emulated", action="store_true", help="the GPU is an emulated one")
    options = parser.parse_args()
    machine, count = look()
    sizes = [int(size) for size in options.ranks.split(",")]
    if max(sizes) > count:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    rows = [*run_doctor(options.out), *run_all_tests(sizes, options.out, options.only, emulated=options.emulated)]
    rows += [] if options.only or options.emulated else run_benchmark(sizes, options.out)
    text = report(machine, rows, sorted(options.out.glob("benchmark-*.txt")))
    (options.out / "README.md").write_text(text)
    sys.stdout.write(text)
    counts = [sum(getattr(row, name) for row in rows) for name in ("passed", "failed", "skipped")]
    (options.out / "counts").write_text(" ".join(map(str, counts)) + "\n")
    return int(any(row.failed for row in rows))


def look() -> tuple[dict[str, str], int]:
    """Return what this machine has, by name, and the number of GPUs.

    Raises:
        SystemExit: There is no GPU.
    """
    try:
        import cupy

        runtime = cupy.cuda.runtime
        count = runtime.getDeviceCount()
    except (ImportError, RuntimeError) as error:
        raise SystemExit(f"expected a GPU: {error}") from None
    properties = runtime.getDeviceProperties(0)
    machine = {
        "GPUs": f"{count} x {properties['name'].decode()} (sm_{properties['major']}{properties['minor']})",
        "driver knows CUDA": _cuda(runtime.driverGetVersion()),
        "CuPy": f"{cupy.__version__} for CUDA {_cuda(runtime.runtimeGetVersion())}",
        "Python": platform.python_version(),
        "commit": _commit(),
    }
    return machine, count


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"


def run_doctor(out: Path) -> Iterator[Row]:
    """Run the doctor."""
    yield run_program("doctor", [sys.executable, "-m", "mn_comm", "doctor"], out / "doctor.txt")


def run_all_tests(sizes: list[int], out: Path, only: str = "", *, emulated: bool = False) -> list[Row]:
    """Run the tests marked ``gpu``: what runs in one process, and what runs on ranks."""
    record = Record(run_tests.RECORD)
    folders = [*sorted(ROOT.glob("packages/*/tests")), ROOT / "tests"]
    folders += [ROOT / "tools" / "gpu_emulator" / "tests"] if emulated else []
    planned = [each for folder in folders for each in plan(folder, sizes, out, only, record)]
    with tempfile.TemporaryDirectory(prefix="mn-", ignore_cleanup_errors=True) as scratch:
        outcomes = run_tests.run(planned, record, Path(scratch), verbose=False, title="Tests that need a GPU")
    return [Row(each.name, each.passed, each.failed, each.skipped, each.seconds) for each in outcomes]


def plan(folder: Path, sizes: list[int], out: Path, only: str, record: Record) -> Iterator[run_tests.Planned]:
    """Return the runs of pytest for a folder of tests."""
    name = "tests" if folder.parent == ROOT else folder.parent.name
    suite = run_tests.Suite(name, str(folder), sys.executable, reports=name, arguments=["-m", "gpu"])
    for part in ALONE:
        tests = marked(folder / part, only)
        if tests:
            yield run_tests.plan_process(suite, part, tests, out, record)
    tests = marked(folder / "mpi", only)
    for size in sizes:
        chosen = [file for file in tests if size == run_tests.MAIN_SIZE or size in run_tests.marked_sizes(file)]
        if chosen:
            yield run_tests.plan_job(suite, size, chosen, out, record)


def marked(folder: Path, only: str = "") -> list[Path]:
    """Return the files of a folder that have the mark ``gpu``."""
    return [file for file in sorted(folder.rglob("test_*.py")) if only in str(file) and run_tests.needs_gpu(file)]


def run_benchmark(sizes: list[int], out: Path) -> Iterator[Row]:
    """Run the benchmarks of GPUs in one process and on ranks."""
    for name in BENCHMARKS:
        program = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py")]
        for size in sorted({1, *sizes}):
            command = ["mpiexec", "-n", str(size), *program] if size > 1 else program
            yield run_program(f"{name}, {size} ranks", command, out / f"benchmark-{name}-{size}.txt")


def run_program(what: str, command: list[str], file: Path) -> Row:
    """Run a program with a time limit, and keep its output."""
    started = time.monotonic()
    with file.open("w") as output:
        try:
            status = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=BENCHMARK_LIMIT
            ).returncode
        except subprocess.TimeoutExpired:
            status = HUNG
    return Row(what, int(status == 0), int(status != 0), 0, time.monotonic() - started)


def report(machine: dict[str, str], rows: Iterable[Row], outputs: Iterable[Path]) -> str:
    """Return the tables, in Markdown."""
    lines = ["# What ran on this machine", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in machine.items()]
    lines += ["", "| what | passed | failed | skipped | seconds |", "|---|---:|---:|---:|---:|"]
    lines += [f"| {row.what} | {row.passed} | {row.failed} | {row.skipped} | {row.seconds:.0f} |" for row in rows]
    for output in outputs:
        lines += ["", f"## {output.stem}", "", "```", output.read_text().strip(), "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
