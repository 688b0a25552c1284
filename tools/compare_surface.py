"""The differences between this ChainerMN and the one in Chainer's wheel, for scripts that import and call it.

    python tools/compare_surface.py            print every difference
    python tools/compare_surface.py --added    print the functions and classes that only ours has

A separate process imports each of the two (``CHAINERMN_IMPL``), and lists everything that can be reached: modules,
names, signatures with their defaults, attributes of classes, and those of the objects that functions return. A
difference is something in the old one that ours does not have, or has in a different form.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

ROOT = "chainermn"
# In the process that inspects one of the two.
IS_OLD = os.environ.get("CHAINERMN_IMPL") == "bundled"
# Names that a module has only imported do not belong to its surface; names in these packages do.
OURS = (
    "chainermn",
    "mn_comm",
    "mn_compress",
    "mn_elastic",
    "mn_guard",
    "mn_data",
    "mn_extensions",
    "mn_modelpar",
    "mn_optim",
)
Surface = dict[str, str]
"""What can be reached, by its dotted path, and in which form."""


class Difference(NamedTuple):
    """A difference between the two.

    Attributes:
        path: The path of the name.
        old: Its form in Chainer's wheel.
        new: Its form here; "missing" if there is none.
    """

    path: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}\n    old: {self.old}\n    new: {self.new}"


def differences(old: Surface, new: Surface) -> list[Difference]:
    """Return the names that ours lacks or has in a different form, sorted by path.

    The contents of missing objects are not listed.
    """
    found: list[Difference] = []
    missing: tuple[str, ...] = ()
    for path, form in sorted(old.items()):
        other = new.get(path, "missing")
        if other != form and not path.startswith(missing or "\0"):
            found.append(Difference(path, form, other))
            if other == "missing":
                inside = path.removesuffix(" (module)")
                missing = (*missing, f"{inside}.", f"{inside} ")
    return found


def surface_of(implementation: str) -> Surface:
    """Return the surface of one of the two.

    Args:
        implementation: ``"ours"`` or ``"bundled"``.
    """
    # A separate folder, because the extensions write files.
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, os.path.abspath(__file__), "--dump"]
        environment = {**os.environ, "CHAINERMN_IMPL": implementation}
        job = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if job.returncode:
        raise RuntimeError(f"looking at {implementation} failed:\n{job.stderr}")
    surface: Surface = json.loads(job.stdout.splitlines()[-1])
    return surface


def look() -> Surface:
    """Return the surface of the implementation that ``import chainermn`` gives here."""
    warnings.simplefilter("ignore")
    package = importlib.import_module(ROOT)
    objects = _objects()  # it creates a communicator, which imports modules that need MPI
    surface: Surface = {}
    names = [ROOT, *(entry.name for entry in pkgutil.walk_packages(package.__path__, f"{ROOT}."))]
    names = [name for name in names if not name.endswith("__main__")]
    for name in names:
        surface[f"{name} (module)"] = "module"
        if _is_reachable(package, name):
            surface[f"{name} as an attribute"] = "module"
    for name in names:
        surface.update(_module_names(importlib.import_module(name)))
    for path, make in objects.items():
        surface.update((f"{ROOT}.{path}.{name}", "attribute") for name in _attributes(make()))
    return {path.removeprefix(f"{ROOT}."): form for path, form in surface.items()}


def _is_reachable(package: types.ModuleType, name: str) -> bool:
    """Return whether a module can be reached from the package by attributes, without importing it."""
    found: Any = package
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    return isinstance(found, types.ModuleType)


def _module_names(module: types.ModuleType) -> Iterator[tuple[str, str]]:
    for name, value in vars(module).items():
        path = f"{module.__name__}.{name}"
        if isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] == ROOT and value.__name__ != path:
                yield path, f"module {value.__name__}"
        elif inspect.isclass(value) or inspect.isroutine(value):
            yield from _definition(module, path, value)
        elif not name.startswith("__") or name == "__version__":
            yield path, _constant(value)


def _definition(module: types.ModuleType, path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield a class with its contents, or a function; those of the old one only in the module that defines them."""
    home = str(value.__module__)
    if home.partition(".")[0] not in OURS:
        return
    yield f"{path} to be imported", "definition"
    if IS_OLD and home != module.__name__:
        return
    yield path, _form(value)
    if inspect.isclass(value):
        yield f"{path} is abstract in", " ".join(sorted(getattr(value, "__abstractmethods__", ())))
        for name in vars(value) if IS_OLD else dir(value):  # inherited names are listed with the base class
            if not name.startswith("__") or name == "__call__":
                yield f"{path}.{name}", _form(inspect.getattr_static(value, name))


def _attributes(value: Any) -> set[str]:
    """Return the public attributes of an object, and those of the object that it represents."""
    found = {name for name in dir(value) if not name.startswith("_")}
    for name in found & {"actual_optimizer", "actual_iterator"}:
        found |= _attributes(getattr(value, name))
    return found


def _form(value: Any) -> str:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if inspect.isclass(value):
        return f"class{_signature(value)}"
    if inspect.isroutine(value):
        return f"function{_signature(value)}"
    if inspect.isdatadescriptor(value) or hasattr(value, "__get__"):
        return "attribute"
    return _constant(value)


def _signature(value: Callable[..., Any]) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(…)"
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    text = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _constant(value: Any) -> str:
    return repr(value) if isinstance(value, (bool, int, float, str, tuple, type(None))) else "attribute"


def _objects() -> dict[str, Callable[[], Any]]:
    """Return the functions that create the objects whose attributes are inspected."""
    import chainer
    import chainermn
    import numpy as np
    from chainer.training import extensions

    comm = chainermn.create_communicator("naive")
    data = list(range(8))

    def model() -> Any:
        return chainer.links.Classifier(chainer.links.Linear(2, 3))

    def iterator() -> Any:
        return chainer.iterators.SerialIterator(data, 2)

    return {
        "create_communicator()": lambda: comm,
        "create_communicator().split()": lambda: comm.split(0, 0),
        "create_multi_node_optimizer()": lambda: chainermn.create_multi_node_optimizer(
            chainer.optimizers.SGD(), comm
        ).setup(model()),
        "create_multi_node_evaluator()": lambda: chainermn.create_multi_node_evaluator(
            extensions.Evaluator(iterator(), model()), comm
        ),
        "create_multi_node_checkpointer()": lambda: chainermn.create_multi_node_checkpointer("run", comm, path="."),
        "extensions.multi_node_snapshot()": lambda: chainermn.extensions.multi_node_snapshot(
            comm, extensions.snapshot(), [0]
        ),
        "extensions.ObservationAggregator()": lambda: chainermn.extensions.ObservationAggregator(comm, "main/loss"),
        "extensions.AllreducePersistent()": lambda: chainermn.extensions.AllreducePersistent(model(), comm),
        "extensions.MultiNodeEarlyStoppingTrigger()": lambda: chainermn.extensions.MultiNodeEarlyStoppingTrigger(comm),
        "extensions.GenericMultiNodeEvaluator()": lambda: chainermn.extensions.GenericMultiNodeEvaluator(
            comm, iterator(), model()
        ),
        "iterators.create_multi_node_iterator()": lambda: chainermn.iterators.create_multi_node_iterator(
            iterator(), comm
        ),
        "iterators.create_synchronized_iterator()": lambda: chainermn.iterators.create_synchronized_iterator(
            iterator(), comm
        ),
        "scatter_dataset()": lambda: chainermn.scatter_dataset(data, comm),
        "links.MultiNodeBatchNormalization()": lambda: chainermn.links.MultiNodeBatchNormalization(3, comm),
        "MultiNodeChainList()": lambda: chainermn.MultiNodeChainList(comm),
        "links.create_multi_node_n_step_rnn()": lambda: chainermn.links.create_multi_node_n_step_rnn(
            chainer.links.NStepLSTM(1, 2, 2, 0.0), comm
        ),
        "functions.pseudo_connect()": lambda: chainermn.functions.pseudo_connect(None, np.zeros(1, "f")),
    }


def main() -> None:
    """Print the differences or, in the process of one implementation, its part of the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--added", action="store_true", help="print the functions and classes that only ours has")
    parser.add_argument("--dump", action="store_true", help="print the surface of one of the two, as JSON")
    options = parser.parse_args()
    if options.dump:
        # Not from the folder of this script, which does not belong to the surface.
        sys.path[0] = ""
        print(json.dumps(look()))
        return
    old, new = surface_of("bundled"), surface_of("ours")
    if options.added:
        imported = " to be imported"
        names = sorted(path.removesuffix(imported) for path in new.keys() - old.keys() if path.endswith(imported))
        print(*(name for name in names if "._" not in name), sep="\n")
    else:
        print(*differences(old, new), sep="\n")


if __name__ == "__main__":
    main()
