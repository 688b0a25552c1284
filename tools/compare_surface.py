"""What differs between this ChainerMN and the one in Chainer's wheel, to somebody who imports and calls it.

    python tools/compare_surface.py            print every difference
    python tools/compare_surface.py --added    print what only ours has

Both are imported by a process of its own (``CHAINERMN_IMPL``), which writes down what can be reached: modules, names,
signatures with their defaults, attributes of classes, and those of the objects that the functions return. A difference
is something of the old one that ours does not have, or has in another form.
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
# What a module has merely imported is no part of what it offers; what lies below these is.
OURS = ("chainermn", "mn_comm", "mn_data", "mn_extensions", "mn_modelpar", "mn_optim")
Surface = dict[str, str]
"""What can be reached, by its dotted path, and in which form."""


class Difference(NamedTuple):
    """One thing in which the two differ.

    Attributes:
        path: Where it is.
        old: Its form in Chainer's wheel.
        new: Its form here; "missing" if there is none.
    """

    path: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}\n    old: {self.old}\n    new: {self.new}"


def differences(old: Surface, new: Surface) -> list[Difference]:
    """Return what ours lacks or has in another form, sorted by path.

    What is inside something that is missing is not listed.
    """
    found: list[Difference] = []
    for path, form in sorted(old.items()):
        if new.get(path) != form and not any(
            path.startswith((f"{d.path}.", f"{d.path}()")) for d in found if d.new == "missing"
        ):
            found.append(Difference(path, form, new.get(path, "missing")))
    return found


def surface_of(implementation: str) -> Surface:
    """Return the surface of one of the two.

    Args:
        implementation: ``"ours"`` or ``"bundled"``.
    """
    # A folder of its own: the extensions write files.
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
    surface: Surface = {}
    for module in _modules(package):
        path = module.__name__
        surface[path] = "module"
        surface.update(_module_names(path, module))
    for path, make in _objects().items():
        surface.update(_object_names(path, make()))
    return surface


def _modules(package: types.ModuleType) -> Iterator[types.ModuleType]:
    """Yield the package and all its modules that can be reached from it by their names, without another import."""
    yield package
    for entry in pkgutil.walk_packages(package.__path__, f"{ROOT}."):
        if entry.name.endswith("__main__"):
            continue
        # Imported first: the old package has those that need MPI only after its first communicator.
        module = importlib.import_module(entry.name)
        yield module


def _module_names(path: str, module: types.ModuleType) -> Iterator[tuple[str, str]]:
    for name in dir(module):
        value = getattr(module, name)
        if name.startswith("__") and name != "__version__":
            continue
        if isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] == ROOT:
                yield f"{path}.{name}", f"module {value.__name__}"
        elif inspect.isclass(value) or inspect.isroutine(value):
            if str(value.__module__).partition(".")[0] in OURS:
                yield f"{path}.{name}", _form(value)
                if inspect.isclass(value):
                    yield from _class_names(f"{path}.{name}", value)
        elif not _is_typing(value):
            yield f"{path}.{name}", _constant(value)


def _is_typing(value: Any) -> bool:
    return getattr(type(value), "__module__", "") in ("typing", "__future__", "types", "logging")


def _class_names(path: str, kind: type) -> Iterator[tuple[str, str]]:
    yield f"{path}()", "abstract " + " ".join(sorted(getattr(kind, "__abstractmethods__", ())))
    for name in dir(kind):
        owner = next((each for each in kind.__mro__ if name in vars(each)), object)
        if owner.__module__.partition(".")[0] not in OURS or (name.startswith("__") and name != "__call__"):
            continue
        yield f"{path}.{name}", _form(inspect.getattr_static(kind, name))


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
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def _constant(value: Any) -> str:
    if isinstance(value, (bool, int, float, str, tuple, type(None))):
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return "attribute"


def _object_names(path: str, value: Any) -> Iterator[tuple[str, str]]:
    for name in dir(value):
        if not name.startswith("_"):
            yield f"{path}.{name}", "attribute"


def _objects() -> dict[str, Callable[[], Any]]:
    """Return what makes the objects whose attributes are looked at."""
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
    """Print the differences, or, of the implementation that is there, what the other process is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--added", action="store_true", help="print what only ours has")
    parser.add_argument("--dump", action="store_true", help="print the surface of one of the two, as JSON")
    options = parser.parse_args()
    if options.dump:
        # Not from the folder of this script, which is no part of the surface.
        sys.path[0] = ""
        print(json.dumps(look()))
        return
    old, new = surface_of("bundled"), surface_of("ours")
    if options.added:
        print(*sorted(new.keys() - old.keys()), sep="\n")
    else:
        print(*differences(old, new), sep="\n")


if __name__ == "__main__":
    main()
