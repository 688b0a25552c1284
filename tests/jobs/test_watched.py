"""No collective call of any package waits without the stall monitor; a new call has to be added to the list."""

import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

WALK = Path(__file__).with_name("watched_calls.py")
MODULES = (
    "mn_comm",
    "mn_comm.building_blocks",
    "mn_compress",
    "mn_elastic",
    "mn_guard",
    "mn_optim",
    "mn_data",
    "mn_modelpar.functions",
    "mn_modelpar.links",
    "mn_extensions",
    "chainermn",
)
FREE = {"Communicator.finalize", "multi_node_snapshot, save"}
# "Broadcast an array; collective.", and what is told of create_multi_node_optimizer and create_multi_node_evaluator.
IS_COLLECTIVE = re.compile(r"(?<!not)[;:,] collective\b|(?:it is|is now|in training) collective")


def walked():
    job = subprocess.run([sys.executable, WALK, "names"], capture_output=True, text=True, check=True)
    return {line.partition(",")[0] for line in job.stdout.splitlines()}


def is_collective(documented):
    return IS_COLLECTIVE.search((inspect.getdoc(documented) or "").partition("\n\nArgs:")[0]) is not None


def methods_of(kind):
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") and is_collective(method):
            yield f"{kind.__name__}.{name}"


def documented_as_collective():
    """Yield the public names that are said to be collective; those of our communicators once."""
    from mn_comm import CommunicatorBase, Strategy
    from mn_comm.building_blocks import Ranks

    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isclass(found):
                # A strategy is called by communicators and reducers, which are walked with several of them; and the
                # methods of Ranks are MPI's.
                is_one_of_many = issubclass(found, CommunicatorBase) and name != "Communicator"
                if found not in (Strategy, Ranks) and not is_one_of_many:
                    yield from methods_of(found)
            elif inspect.isfunction(found) and is_collective(found):
                yield f"functions.{name}" if module.__name__.endswith(".functions") else name


def test_the_walk_knows_every_collective_call():
    documented = set(documented_as_collective())
    assert len(documented) > 40
    assert documented <= walked()


def test_every_collective_call_is_watched(tmp_path):
    launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    job = subprocess.run(
        [launcher, "-n", "2", sys.executable, "-W", "ignore", WALK, *FREE],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CHAINERMN_STALL_SECONDS": "0.2"},
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    found = dict(line.split(": ") for line in job.stdout.splitlines())
    assert {name.partition(",")[0] for name in found} == walked()
    assert {name: how for name, how in found.items() if how != "watched"} == dict.fromkeys(FREE, "waits for nobody")
