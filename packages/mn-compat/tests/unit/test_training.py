"""A few steps of training on the installed NumPy; warnings are errors here, as everywhere in these tests."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

RS = np.random.RandomState(0)


class Recurrent(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.lstm = L.NStepLSTM(2, 4, 8, 0.1)
            self.out = L.Linear(8, 2)

    def forward(self, xs):
        h, _, _ = self.lstm(None, None, list(xs))
        return self.out(h[-1])


MODELS = {
    "mlp": (
        lambda: chainer.Sequential(L.Linear(None, 16), F.relu, L.Linear(2)),
        lambda n: RS.rand(n, 6).astype(np.float32),
    ),
    "convolution": (
        lambda: chainer.Sequential(
            L.Convolution2D(None, 8, 3, pad=1),
            L.BatchNormalization(8),
            F.relu,
            lambda x: F.max_pooling_2d(x, 2),
            L.Linear(2),
        ),
        lambda n: RS.rand(n, 3, 6, 6).astype(np.float32),
    ),
    "lstm": (Recurrent, lambda n: [RS.rand(3, 4).astype(np.float32) for _ in range(n)]),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer", ["Adam", "MomentumSGD", "SMORMS3"])
def test_the_loss_goes_down_in_float32(name, optimizer):
    RS.seed(0)
    np.random.seed(0)  # for the parameters and the dropout
    build, inputs = MODELS[name]
    model = L.Classifier(build())
    optimizer = getattr(chainer.optimizers, optimizer)(np.float64(0.05)).setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(5.0))
    xs = inputs(32)
    t = np.array([np.asarray(x).mean() > 0.5 for x in xs], np.int32)
    losses = []
    for _ in range(12):
        optimizer.update(model, xs, t)
        losses.append(float(model.loss.array))
    assert np.isfinite(losses).all()
    assert min(losses[6:]) < losses[0]
    for path, param in model.namedparams():
        assert param.dtype == param.grad.dtype == np.float32, path
        for state in param.update_rule.state.values():
            assert getattr(state, "dtype", np.float32) == np.float32, path


def test_a_trainer_with_evaluator_log_and_snapshot(tmp_path):
    from chainer import training
    from chainer.training import extensions

    x = RS.rand(40, 6).astype(np.float32)
    data = chainer.datasets.TupleDataset(x, (x.sum(1) > 3).astype(np.int32))
    model = L.Classifier(chainer.Sequential(L.Linear(6, 8), F.relu, L.Linear(8, 2)))
    optimizer = chainer.optimizers.Adam().setup(model)

    def trainer(epochs):
        updater = training.StandardUpdater(chainer.iterators.SerialIterator(data, 10), optimizer)
        trainer = training.Trainer(updater, (epochs, "epoch"), out=tmp_path)
        once = chainer.iterators.SerialIterator(data, 10, repeat=False, shuffle=False)
        trainer.extend(extensions.Evaluator(once, model))
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.snapshot(filename="snapshot"))
        return trainer

    first = trainer(2)
    first.run()
    resumed = trainer(3)
    chainer.serializers.load_npz(tmp_path / "snapshot", resumed)
    resumed.run()
    log = resumed.get_extension("LogReport").log
    assert [entry["epoch"] for entry in log] == [1, 2, 3]
    assert all(np.isfinite(entry["validation/main/loss"]) for entry in log)


def test_every_module_of_chainer_imports(python):
    code = (
        "import importlib, pkgutil, warnings; warnings.simplefilter('error'); import chainer\n"
        "for module in pkgutil.walk_packages(chainer.__path__, 'chainer.'): importlib.import_module(module.name)"
    )
    python("-c", code)
