"""Public programs that use ChainerMN: their requirements, run unchanged or imitated, with both implementations."""

import json

import pytest

pytestmark = pytest.mark.rest

STUDY = """
import sys, warnings
warnings.simplefilter("ignore")  # of optuna, about these classes
if sys.argv[1] == "bundled":
    import mpi4py.MPI  # before the old implementation looks for it
import json
import chainer, chainer.functions as F, chainer.links as L, chainermn
import numpy as np
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna_integration.chainermn import ChainerMNStudy

optuna.logging.set_verbosity(optuna.logging.ERROR)
comm = chainermn.create_communicator("naive")
random = np.random.RandomState(0)
inputs = random.rand(64, 8).astype("f4")
labels = (inputs.sum(axis=1) > 4).astype("i4")

def objective(trial, comm):
    units = trial.suggest_int("units", 4, 16)
    rate = trial.suggest_float("rate", 1e-2, 1e-1, log=True)
    kind = trial.suggest_categorical("kind", ["SGD", "MomentumSGD"])
    if trial.number == 1:
        raise ArithmeticError("a trial that fails, on all ranks")
    np.random.seed(trial.number)
    model = L.Classifier(chainer.Sequential(L.Linear(8, units), F.relu, L.Linear(units, 2)))
    data = chainer.datasets.TupleDataset(inputs, labels) if comm.rank == 0 else None
    train = chainermn.scatter_dataset(data, comm, shuffle=True, seed=trial.number)
    iterator = chainer.iterators.SerialIterator(train, 8, shuffle=False)
    optimizer = chainermn.create_multi_node_optimizer(getattr(chainer.optimizers, kind)(rate), comm)
    optimizer.setup(model)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    trainer = chainer.training.Trainer(updater, (3, "epoch"), out=sys.argv[2])
    test = chainer.iterators.SerialIterator(train, 8, repeat=False, shuffle=False)
    evaluator = chainermn.create_multi_node_evaluator(chainer.training.extensions.Evaluator(test, model), comm)
    def report(trainer):
        trial.report(float(evaluator()["main/loss"]), trainer.updater.iteration)
        if trial.number == 2 or trial.should_prune():
            raise optuna.TrialPruned()
    trainer.extend(report, name="report", trigger=(1, "epoch"))
    trainer.run(show_loop_exception_msg=False)
    trial.set_user_attr("ranks", comm.size)
    assert comm.mpi_comm.allgather(trial.params) == [trial.params] * comm.size
    return float(evaluator()["main/loss"])

storage = JournalStorage(JournalFileBackend(sys.argv[2] + "/journal"))
if comm.rank == 0:
    optuna.create_study(study_name="one", storage=storage)
comm.mpi_comm.Barrier()
sampler, pruner = optuna.samplers.TPESampler(seed=1), optuna.pruners.MedianPruner(2)
study = ChainerMNStudy(optuna.load_study(study_name="one", storage=storage, sampler=sampler, pruner=pruner), comm)
study.optimize(objective, n_trials=6, catch=(ArithmeticError,))
comm.mpi_comm.Barrier()
if comm.rank == 0:
    print(json.dumps([(t.state.name, t.value, t.params, t.user_attrs) for t in study.trials]))
"""


def test_a_study_of_optuna(mpiexec, tmp_path):
    pytest.importorskip("optuna_integration.chainermn")
    found = {}
    for implementation in ("bundled", "ours"):
        (folder := tmp_path / implementation).mkdir()
        printed = mpiexec(2, "-c", STUDY, implementation, folder, CHAINERMN_IMPL=implementation)
        found[implementation] = json.loads(printed)
    states = [state for state, *_ in found["ours"]]
    assert states[:3] == ["COMPLETE", "FAIL", "PRUNED"]
    assert len(states) == 6
    assert found["ours"][0][3] == {"ranks": 2}
    assert found["ours"] == found["bundled"]


FOREIGN = """
import sys
if sys.argv[1] == "bundled":
    import mpi4py.MPI
import json
import chainer, chainermn
import numpy as np

comm = chainermn.create_communicator(sys.argv[2])

class Framework:
    "Another framework: it has weights and gradients in memory of its own, and takes its own steps."
    def __init__(self, weights):
        self.weights = weights
        self.grads = [np.zeros_like(weight) for weight in weights]
        self.steps = 0
    def backward(self, inputs):
        for weight, grad in zip(self.weights, self.grads):
            grad += weight * inputs
    def step(self):
        self.steps += 1
        for weight, grad in zip(self.weights, self.grads):
            weight -= 0.1 * grad
            grad[...] = 0

class Adapter:
    "What Chainer-PyTorch migration passes for an optimizer: no class of Chainer's, and all attributes are another's."
    def __init__(self, framework):
        vars(self)["framework"] = framework
    def setup(self, link):
        self.target = link
        return self
    def update(self, lossfun=None, *args, **kwds):
        self.framework.step()
    def __getattr__(self, name):
        return getattr(vars(self)["framework"], name)
    def __setattr__(self, name, value):
        setattr(self.framework, name, value)

random = np.random.RandomState(comm.rank)
framework = Framework([random.rand(3, 2).astype("f4"), random.rand(5).astype("f4"), random.rand(300, 300).astype("f4")])
model = chainer.Chain()
with model.init_scope():
    for i, (weight, grad) in enumerate(zip(framework.weights, framework.grads)):
        param = chainer.Parameter(weight)
        param.grad = grad
        setattr(model, "w" + str(i), param)
optimizer = chainermn.create_multi_node_optimizer(Adapter(framework), comm)
optimizer.setup(model)
for _ in range(4):
    framework.backward(comm.rank + 1)
    for name, grad in zip(("w0", "w1", "w2"), framework.grads):
        getattr(model, name).grad = grad
    optimizer.update()
assert optimizer.steps == 3
sums = [float(weight.sum()) for weight in framework.weights]
assert comm.mpi_comm.allgather(sums) == [sums] * comm.size
if comm.rank == 0:
    print(json.dumps(sums))
"""


def test_an_optimizer_that_is_not_chainers(mpiexec):
    """The gradients of another framework are averaged where they are, and its optimizer takes the steps."""
    expected = mpiexec(2, "-c", FOREIGN, "bundled", "naive", CHAINERMN_IMPL="bundled")
    for name in ("naive", "flat", "two_dimensional"):
        assert mpiexec(2, "-c", FOREIGN, "ours", name) == expected
