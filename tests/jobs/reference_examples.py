"""Run the examples of the reference on the ranks of a job: those in docstrings, and those in given pages.

Every rank runs all of them, in the same order; one that fails ends the job.
"""

import doctest
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np

import mn_comm
import mn_compat
import mn_elastic
import mn_extensions

PACKAGES = [
    "mn_comm",
    "mn_comm.building_blocks",
    "mn_compress",
    "mn_elastic",
    "mn_guard",
    "mn_data",
    "mn_extensions",
    "mn_modelpar",
    "mn_optim",
    "mn_compat",
    "chainermn",
]


def documented():
    """Yield the name and docstring of each public name once; those of mn_compat, which change NumPy, come late."""
    seen = set()
    for module in map(import_module, PACKAGES):
        modules = [getattr(module, name) for name in module.__all__]
        modules = [
            each for each in modules if isinstance(each, ModuleType) and each.__name__.startswith(("mn_", "chai"))
        ]
        for home in [module, *modules]:
            for name in home.__all__:
                yield from texts(f"{home.__name__}.{name}", getattr(home, name), seen)


def texts(name, found, seen):
    if id(found) in seen or isinstance(found, ModuleType):
        return
    seen.add(id(found))
    yield name, getattr(found, "__doc__", None) or ""
    if isinstance(found, type) and found.__module__.startswith("mn_"):
        for member, value in vars(found).items():
            if callable(value) and not member.startswith("_"):
                yield from texts(f"{name}.{member}", value, seen)


def trainer_of(comm):
    """Return a trainer and its updater, as examples of extensions expect them."""
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
    optimizer.setup(L.Classifier(L.Linear(3, 2)))
    data = chainer.datasets.TupleDataset(np.ones((4, 3), np.float32), np.zeros(4, np.int32))
    updater = chainer.training.StandardUpdater(chainer.iterators.SerialIterator(data, 2), optimizer)
    return chainer.training.Trainer(updater, (2, "iteration")), updater


def main():
    comm = chainermn.create_communicator()
    names = {"np": np, "chainer": chainer, "F": F, "L": L, "chainermn": chainermn, "mn_comm": mn_comm}
    names |= {"mn_compat": mn_compat, "mn_elastic": mn_elastic, "mn_extensions": mn_extensions, "comm": comm}
    examples = [*documented(), *((page, Path(page).read_text().replace("```", "")) for page in sys.argv[1:])]
    runner, parser = doctest.DocTestRunner(), doctest.DocTestParser()
    having = 0
    for name, text in examples:
        trainer, updater = trainer_of(comm)
        test = parser.get_doctest(text, {**names, "trainer": trainer, "updater": updater}, name, name, 0)
        if test.examples:
            having += 1
            if runner.run(test, clear_globs=False).failed:
                sys.exit(f"rank {comm.rank}: the example of {name} fails")
    sys.stdout.write(f"rank {comm.rank}: {having} texts with examples\n")  # in one piece


if __name__ == "__main__":
    main()
