"""Optimizers, hooks, updaters, iterators, serializers, initializers and distributions with a model on the device."""

import inspect
import io
from contextlib import redirect_stdout

import chainer
import numpy as np
import pytest
from chainer import distributions, function_hooks, initializers, iterators, link_hooks, optimizer_hooks, optimizers
from chainer import functions as F
from chainer import links as L
from chainer.backends import cuda
from chainer.training import extensions, updaters

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

STEPS = 4
COUNT = cupy.cuda.runtime.getDeviceCount()
needs_two_devices = pytest.mark.skipif(COUNT < 2, reason="needs two devices")


@pytest.fixture(autouse=True)
def first_device():
    yield
    chainer.get_device("@numpy").use()


def public(module, base=object):
    """Return the classes that a module offers."""
    return {name for name, found in vars(module).items() if inspect.isclass(found) and issubclass(found, base)}


class Model(chainer.Chain):
    """Two layers and a batch normalization."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            # A bias before the normalization has the gradient zero, of which Adam would amplify the rounding errors.
            self.first = L.Linear(4, 5, nobias=True)
            self.normalize = L.BatchNormalization(5)
            self.second = L.Linear(5, 3)

    def forward(self, x):
        return self.second(F.relu(self.normalize(self.first(x))))


def model_on(device, dtype=np.float32):
    """Return a model that has the same parameters on each device."""
    np.random.seed(4)
    with chainer.using_device("@numpy"), chainer.using_config("dtype", np.dtype(dtype)):
        model = L.Classifier(Model())
    model.to_device(device)
    chainer.get_device(device).use()
    return model


def samples(count=24, dtype=np.float32):
    state = np.random.RandomState(5)
    return [(state.standard_normal(4).astype(dtype), np.int32(state.randint(3))) for _ in range(count)]


def trained(device, optimizer, hook=None, dtype=np.float32):
    """Return the parameters, and the optimizer's state, after some steps."""
    model = model_on(device, dtype)
    optimizer.setup(model)
    if hook is not None:
        optimizer.add_hook(hook)
    for step in range(STEPS):
        batch = samples(dtype=dtype)[step * 6 : step * 6 + 6]
        x, t = chainer.dataset.concat_examples(batch, chainer.get_device(device))
        optimizer.update(model, x, t)
    return on_host(model)


def on_host(model):
    host = chainer.get_device("@numpy")
    found = {name: host.send(parameter.array) for name, parameter in model.namedparams()}
    for name, parameter in model.namedparams():
        state = getattr(parameter.update_rule, "state", None) or {}
        found |= {f"{name} {key}": host.send(value) for key, value in state.items() if hasattr(value, "shape")}
    return found


def assert_equal(expected, found, tolerance=2e-4):
    assert set(expected) == set(found)
    for name, array in expected.items():
        assert array.dtype == found[name].dtype, name
        np.testing.assert_allclose(
            found[name].astype("f8"), array.astype("f8"), rtol=tolerance, atol=tolerance, err_msg=name
        )


OPTIMIZERS = sorted(public(optimizers))


@pytest.mark.parametrize(
    ("name", "dtype"),
    # MSVAG divides by the difference of two nearly equal numbers, of which float16 keeps no digit.
    [(name, dtype) for name in OPTIMIZERS for dtype in ("float16", "float32") if (name, dtype) != ("MSVAG", "float16")],
)
def test_optimizers(name, dtype):
    make = getattr(optimizers, name)
    # In float16, AdaGrad's and others' small constants are zero.
    options = {"eps": 1e-3} if dtype == "float16" and "eps" in inspect.signature(make).parameters else {}
    expected = trained("@numpy", make(**options), dtype=dtype)
    assert_equal(expected, trained("@cupy:0", make(**options), dtype=dtype), 2e-2 if dtype == "float16" else 2e-4)


def test_an_optimizer_with_float32_copies_of_float16_parameters():
    def run(device):
        optimizer = optimizers.MomentumSGD(0.1)
        optimizer.use_fp32_update()
        optimizer.set_loss_scale(8)
        return trained(device, optimizer, dtype="float16")

    assert_equal(run("@numpy"), run("@cupy:0"), 2e-2)


HOOKS = {
    "GradientClipping": lambda: optimizer_hooks.GradientClipping(0.5),
    "GradientHardClipping": lambda: optimizer_hooks.GradientHardClipping(-0.01, 0.01),
    "GradientLARS": lambda: optimizer_hooks.GradientLARS(),
    "Lasso": lambda: optimizer_hooks.Lasso(0.01),
    "WeightDecay": lambda: optimizer_hooks.WeightDecay(0.01),
}


@pytest.mark.parametrize("name", HOOKS)
def test_optimizer_hooks(name):
    expected = trained("@numpy", optimizers.MomentumSGD(0.1), HOOKS[name]())
    assert_equal(expected, trained("@cupy:0", optimizers.MomentumSGD(0.1), HOOKS[name]()))


def test_gradient_noise():
    found = trained("@cupy:0", optimizers.SGD(0.1), optimizer_hooks.GradientNoise(0.1))
    assert all(np.isfinite(array).all() for array in found.values())


def test_every_optimizer_hook_is_here():
    assert public(optimizer_hooks) == {*HOOKS, "GradientNoise"}


ITERATORS = {
    "SerialIterator": lambda data: iterators.SerialIterator(data, 6),
    "MultithreadIterator": lambda data: iterators.MultithreadIterator(data, 6, n_threads=2),
    "MultiprocessIterator": lambda data: iterators.MultiprocessIterator(data, 6, n_processes=1),
}


def train(device, iterator, updater=updaters.StandardUpdater, folder=None, **options):
    """Train with a trainer; return the parameters and what was reported."""
    model = model_on(device)
    optimizer = optimizers.Adam().setup(model)
    trainer = chainer.training.Trainer(
        updater(iterator, optimizer, device=chainer.get_device(device), **options),
        (STEPS, "iteration"),
        out=str(folder),
    )
    trainer.extend(extensions.LogReport(trigger=(2, "iteration"), filename=None))
    test = iterators.SerialIterator(samples(10), 5, repeat=False, shuffle=False)
    trainer.extend(extensions.Evaluator(test, model, device=chainer.get_device(device)), trigger=(2, "iteration"))
    trainer.run()
    log = trainer.get_extension("LogReport").log
    return on_host(model), [(entry["main/loss"], entry["validation/main/loss"]) for entry in log]


@pytest.mark.parametrize("name", ITERATORS)
def test_iterators_and_the_updater_and_the_evaluator(name, tmp_path):
    if name == "MultiprocessIterator":
        import multiprocessing

        multiprocessing.set_start_method("forkserver", force=True)

    def run(device):
        np.random.seed(6)
        iterator = ITERATORS[name](samples())
        try:
            return train(device, iterator, folder=tmp_path)
        finally:
            iterator.finalize()

    (expected, log), (found, log_on_device) = run("@numpy"), run("@cupy:0")
    assert_equal(expected, found)
    np.testing.assert_allclose(log_on_device, log, rtol=1e-4)


@needs_two_devices
def test_the_parallel_updater(tmp_path):
    """Two devices with half of each batch give what one gives: the updater adds the means of the halves."""
    data = samples()

    def model():
        np.random.seed(4)
        return L.Classifier(L.Linear(4, 3))

    found = []
    for devices, rate in ({"main": 0}, 0.1), ({"main": 0, "second": 1}, 0.05):
        chainer.backends.cuda.get_device_from_id(0).use()
        trained_model = model()
        optimizer = optimizers.SGD(rate).setup(trained_model)
        iterator = iterators.SerialIterator(data, 6, shuffle=False)
        updater = updaters.ParallelUpdater(iterator, optimizer, devices=devices)
        for _ in range(STEPS):
            updater.update()
        found.append(on_host(trained_model))
    assert_equal(found[0], found[1])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gathering_and_scattering_for_the_multiprocess_updater(dtype):
    from chainer.training.updaters import multiprocess_parallel_updater as module

    model = model_on("@cupy:0", dtype)
    model.cleargrads()
    expected = np.concatenate([cuda.to_cpu(p.array).ravel() for _, p in sorted(model.namedparams())])
    gathered = module.gather_params(model)
    np.testing.assert_allclose(gathered.get(), expected.astype("f"))
    module.scatter_grads(model, gathered)
    np.testing.assert_allclose(module.gather_grads(model).get(), expected.astype("f"))


@pytest.mark.parametrize("form", ["npz", "hdf5"])
def test_serializers(form, tmp_path):
    if form == "hdf5":
        pytest.importorskip("h5py")
    save, load = getattr(chainer.serializers, f"save_{form}"), getattr(chainer.serializers, f"load_{form}")
    model = model_on("@cupy:0")
    optimizer = optimizers.Adam().setup(model)
    x, t = chainer.dataset.concat_examples(samples(6), chainer.get_device("@cupy:0"))
    optimizer.update(model, x, t)
    files = [str(tmp_path / f"{name}.{form}") for name in ("model", "optimizer")]
    save(files[0], model)
    save(files[1], optimizer)
    for device in "@cupy:0", f"@cupy:{COUNT - 1}", "@numpy":
        other = model_on(device)
        again = optimizers.Adam().setup(other)
        load(files[0], other)
        load(files[1], again)
        assert other.device == chainer.get_device(device)
        assert_equal(on_host(model), on_host(other), 0)
        assert again.t == 1


def test_a_snapshot_of_a_trainer_on_the_device(tmp_path):
    def trainer():
        model = model_on("@cupy:0")
        iterator = iterators.SerialIterator(samples(), 6, shuffle=False)
        updater = updaters.StandardUpdater(
            iterator, optimizers.Adam().setup(model), device=chainer.get_device("@cupy:0")
        )
        return model, chainer.training.Trainer(updater, (STEPS, "iteration"), out=str(tmp_path))

    model, first = trainer()
    first.extend(extensions.snapshot(filename="snapshot"), trigger=(STEPS, "iteration"))
    first.run()
    other, second = trainer()
    chainer.serializers.load_npz(tmp_path / "snapshot", second)
    assert_equal(on_host(model), on_host(other), 0)


INITIALIZERS = {
    "Constant": lambda: initializers.Constant(2),
    "DownsamplingConvFilter": lambda: initializers.DownsamplingConvFilter(),
    "Identity": lambda: initializers.Identity(2),
    "UpsamplingDeconvFilter": lambda: initializers.UpsamplingDeconvFilter(),
}
SHAPES = {"Identity": (4, 4), "DownsamplingConvFilter": (3, 3, 4, 4), "UpsamplingDeconvFilter": (3, 3, 4, 4)}


@pytest.mark.parametrize("name", sorted(public(initializers, chainer.Initializer) - {"Initializer"}))
def test_initializers(name):
    shape = SHAPES.get(name, (40, 50))

    def values(device):
        make = INITIALIZERS.get(name, getattr(initializers, name))
        with chainer.using_device(device):
            return initializers.generate_array(make(), shape, chainer.get_device(device).xp, np.float32, device)

    expected, found = values("@numpy"), values("@cupy:0")
    assert isinstance(found, cuda.ndarray)
    found = cuda.to_cpu(found)
    if "rng" in inspect.signature(getattr(initializers, name)).parameters or name.endswith(
        ("Normal", "Uniform", "Orthogonal")
    ):
        np.testing.assert_allclose(found.std(), expected.std(), rtol=0.15)
        assert abs(found.mean() - expected.mean()) < 0.15 * max(expected.std(), 1e-3)
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    if name == "Orthogonal":
        np.testing.assert_allclose(found @ found.T, np.eye(len(found)) * (found[0] @ found[0]), atol=1e-3)


P, Q = np.array([0.3, 0.6], "f"), np.array([1.2, 2.5], "f")
DISTRIBUTIONS = {
    "Bernoulli": (dict(p=P), np.array([0, 1], "f")),
    "Beta": (dict(a=Q, b=Q + 1), P),
    "Categorical": (dict(p=np.array([[0.2, 0.8], [0.5, 0.5]], "f")), np.array([0, 1], "i")),
    "Cauchy": (dict(loc=P, scale=Q), Q),
    "Chisquare": (dict(k=Q), Q),
    "Dirichlet": (dict(alpha=np.array([[1.0, 2.0, 3.0]], "f")), np.array([[0.2, 0.3, 0.5]], "f")),
    "Exponential": (dict(lam=Q), Q),
    "Gamma": (dict(k=Q, theta=Q), Q),
    "Geometric": (dict(p=P), np.array([1, 3], "f")),
    "Gumbel": (dict(loc=P, scale=Q), Q),
    "Laplace": (dict(loc=P, scale=Q), Q),
    "LogNormal": (dict(mu=P, sigma=Q), Q),
    "MultivariateNormal": (dict(loc=P, scale_tril=np.array([[1, 0], [0.5, 2]], "f")), Q),
    "Normal": (dict(loc=P, scale=Q), Q),
    "OneHotCategorical": (dict(p=np.array([[0.2, 0.8]], "f")), np.array([[0, 1]], "f")),
    "Pareto": (dict(scale=Q, alpha=Q), Q + 2),
    "Poisson": (dict(lam=Q), np.array([1, 3], "f")),
    "Uniform": (dict(low=P, high=Q + 1), Q),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name):
    parameters, value = DISTRIBUTIONS[name]

    def run(device):
        device = chainer.get_device(device)
        with chainer.using_device(device):
            made = {key: chainer.Variable(device.send(array)) for key, array in parameters.items()}
            distribution = getattr(distributions, name)(**made)
            log = F.sum(distribution.log_prob(device.send(value)))
            log.backward()
            draws = distribution.sample(300)
            assert device.is_array_supported(draws.array)
            found = {"log": log.array, "mean of draws": draws.array.mean(0)}
            found |= {f"gradient of {key}": one.grad for key, one in made.items() if one.grad is not None}
            return {key: cuda.to_cpu(array) for key, array in found.items()}

    expected, found = run("@numpy"), run("@cupy:0")
    assert set(expected) == set(found)
    del expected["mean of draws"]
    assert np.isfinite(found.pop("mean of draws")).all() or name in ("Cauchy", "Pareto")
    assert_equal(expected, found, 1e-3)


def test_every_distribution_is_here():
    names = {name for name in public(distributions) if issubclass(getattr(distributions, name), chainer.Distribution)}
    assert names - {"Independent"} == set(DISTRIBUTIONS)


def test_function_hooks():
    hooks = [
        function_hooks.TimerHook(),
        function_hooks.CupyMemoryProfileHook(),
        function_hooks.CUDAProfileHook(),
        function_hooks.PrintHook(),
    ]
    assert {type(hook).__name__ for hook in hooks} == public(function_hooks)
    x, t = chainer.dataset.concat_examples(samples(6), chainer.get_device("@cupy:0"))
    for hook in hooks:
        model = model_on("@cupy:0")
        model.cleargrads()
        with redirect_stdout(io.StringIO()), hook:
            model(x, t).backward()
        assert all(parameter.grad is not None for parameter in model.params())
    assert hooks[0].total_time() > 0
    assert hooks[1].total_acquired_bytes() >= 0


@pytest.mark.parametrize("name", ["SpectralNormalization", "WeightStandardization"])
def test_link_hooks(name):
    def run(device):
        np.random.seed(7)
        link = L.Convolution2D(2, 3, 3)
        np.random.seed(8)
        options = {} if name == "WeightStandardization" else {"eps": 1e-5}
        link.add_hook(getattr(link_hooks, name)(**options))
        link.to_device(device)
        device = chainer.get_device(device)
        x = device.send(np.random.RandomState(9).rand(1, 2, 5, 5).astype("f"))
        with chainer.using_device(device):
            y = link(x)
            F.sum(y * y).backward()
        return {"y": cuda.to_cpu(y.array), "gradient": cuda.to_cpu(link.W.grad)}

    assert_equal(run("@numpy"), run("@cupy:0"))


def test_the_timer_hook_of_links():
    x, t = chainer.dataset.concat_examples(samples(6), chainer.get_device("@cupy:0"))
    with link_hooks.TimerHook() as hook:
        model_on("@cupy:0")(x, t)
    assert hook.total_time() > 0
    assert public(link_hooks) == {"SpectralNormalization", "WeightStandardization", "TimerHook"}


@needs_two_devices
def test_copies_between_devices_and_the_host():
    array = np.arange(6, dtype="f").reshape(2, 3)
    first = cuda.to_gpu(array, 0)
    second = cuda.copy(first, out_device=1)
    assert (int(first.device), int(second.device)) == (0, 1)
    np.testing.assert_array_equal(cuda.to_cpu(second), array)
    assert cuda.copy(second).device == second.device
    model = model_on("@cupy:0")
    model.to_device("@cupy:1")
    assert all(int(parameter.array.device) == 1 for parameter in model.params())


def test_examples_that_are_transferred_while_the_device_computes():
    transfer = chainer.dataset.convert.ConcatWithAsyncTransfer()
    batches = [transfer(samples(12)[start : start + 6], 0) for start in (0, 6)]
    expected = [chainer.dataset.concat_examples(samples(12)[start : start + 6]) for start in (0, 6)]
    for (x, t), (want_x, want_t) in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(cuda.to_cpu(x), want_x)
        np.testing.assert_array_equal(cuda.to_cpu(t), want_t)
