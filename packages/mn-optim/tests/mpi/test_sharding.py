"""Optimizer state that is divided among the ranks: the only difference is the memory."""

from concurrent.futures import ThreadPoolExecutor

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from sharded_training import (
    COMM,
    RANK,
    Net,
    batch,
    check_divided,
    make,
    parameters,
    same,
    same_everywhere,
    states,
    train,
)

from mn_comm import create_communicator
from mn_optim import (
    AfterBackward,
    Asynchronous,
    DuringBackward,
    LocalSGD,
    MultiNodeOptimizer,
    OneStepLate,
    Sharded,
    SynchronousFirst,
)

pytestmark = pytest.mark.sizes(1, 3)

SIZE = COMM.size
WHEN = pytest.mark.parametrize("when", [AfterBackward(), DuringBackward()], ids=["after", "during"])


def owners_in(optimizer):
    return optimizer._stepper.scheme.shards._owners


def compare(run):
    """Check that a function trains equally with and without sharding; return both optimizers.

    Args:
        run: Trains with the given options, and returns the optimizer.
    """
    expected, actual = run(sharded=False), run(sharded=True)
    same(parameters(actual.target), parameters(expected.target))
    same_everywhere(actual.target)
    return actual, expected


@pytest.fixture
def folder(tmp_path_factory):
    return COMM.bcast_obj(str(tmp_path_factory.mktemp("run")) if RANK == 0 else None)


def saved_by_all(optimizer):
    """Return what this rank saves of the whole state; collective."""
    for rank in range(SIZE):
        optimizer.consolidate(to=rank)
    return chainer.serializers.npz.serialize(optimizer)


def test_a_rank_saves_alone_what_all_have(folder):
    """As with Chainer's own snapshot: after consolidate(), the other ranks may already be in the next step."""
    unsharded = make()
    train(unsharded, 5)
    optimizer = make(sharded=True)
    train(optimizer, 5)
    optimizer.consolidate(to=SIZE - 1)
    if RANK == SIZE - 1:
        chainer.serializers.save_npz(f"{folder}/optimizer.npz", optimizer)
        chainer.serializers.save_npz(f"{folder}/model.npz", optimizer.target)
    had = states(optimizer).keys()
    train(optimizer, 5, first=5)
    assert states(optimizer).keys() == had
    COMM.barrier()
    layout = {key: np.array(value) for key, value in chainer.serializers.npz.serialize(unsharded).items()}
    with np.load(f"{folder}/optimizer.npz") as saved:
        assert set(saved) == layout.keys()
        for key, value in layout.items():
            np.testing.assert_array_equal(saved[key], value)
            assert saved[key].dtype == value.dtype
    train(unsharded, 5, first=5)
    for wrap in (lambda o: make(o, sharded=True), make):  # with sharding again, and without
        resumed = wrap(chainer.optimizers.Adam())
        resumed.target(*batch(0))  # so that the last parameters exist
        chainer.serializers.load_npz(f"{folder}/model.npz", resumed.target)
        chainer.serializers.load_npz(f"{folder}/optimizer.npz", resumed)
        resumed.assume_synchronized()
        train(resumed, 5, first=5)
        same(parameters(resumed.target), parameters(unsharded.target))
        same_everywhere(resumed.target)
    plain = chainer.optimizers.Adam().setup(Net())
    plain.target(*batch(0))
    chainer.serializers.load_npz(f"{folder}/optimizer.npz", plain)
    for key, value in chainer.serializers.npz.serialize(plain).items():
        np.testing.assert_array_equal(value, layout[key])


@pytest.mark.parametrize("steps", [2, 4, 5, 7])
def test_synchronous_first_is_resumed_in_either_phase(folder, steps):
    """In the first phase, every rank updates all parameters, and needs all of the state."""

    def begin():
        return make(chainer.optimizers.MomentumSGD(0.1), when=SynchronousFirst(4, Sharded()))

    lasting, resumed = begin(), begin()
    train(lasting, 1 + steps)
    lasting.consolidate()
    if RANK == 0:
        chainer.serializers.save_npz(f"{folder}/optimizer.npz", lasting)
        chainer.serializers.save_npz(f"{folder}/model.npz", lasting.target)
    COMM.barrier()
    resumed.target(*batch(0))  # so that the last parameters exist
    chainer.serializers.load_npz(f"{folder}/model.npz", resumed.target)
    chainer.serializers.load_npz(f"{folder}/optimizer.npz", resumed)
    resumed.assume_synchronized()
    for iteration in range(1 + steps, 11):
        for optimizer in (lasting, resumed):
            train(optimizer, 1, first=iteration)
        same(parameters(resumed.target), parameters(lasting.target))
        same_everywhere(resumed.target)
    assert states(resumed).keys() == states(lasting).keys()


def test_what_is_loaded_of_others_is_dropped(folder):
    optimizer = make(sharded=True)
    train(optimizer, 3)
    optimizer.consolidate()
    if RANK == 0:
        chainer.serializers.save_npz(f"{folder}/optimizer.npz", optimizer)
    COMM.barrier()
    expected = {name: value.copy() for name, value in states(optimizer).items()}
    train(optimizer, 3)
    chainer.serializers.load_npz(f"{folder}/optimizer.npz", optimizer)  # while it runs
    same(states(optimizer), expected)
    assert optimizer.t == 2
    other = make(sharded=True)
    other.target(*batch(0))
    chainer.serializers.load_npz(f"{folder}/optimizer.npz", other)
    same(states(other), expected)
    other.consolidate()
    if RANK == 0:  # before the first step, it is still where it was loaded
        chainer.serializers.save_npz(f"{folder}/again.npz", other)
        with np.load(f"{folder}/again.npz") as again, np.load(f"{folder}/optimizer.npz") as first:
            assert set(again) == set(first)
            for key in first:
                np.testing.assert_array_equal(again[key], first[key])
    COMM.barrier()


@pytest.mark.skipif(SIZE < 2, reason="needs a rank that has not loaded yet")
def test_what_others_have_still_to_load_is_not_gathered(folder):
    optimizer = make(sharded=True)
    train(optimizer, 3)
    optimizer.consolidate()
    if RANK == 0:
        chainer.serializers.save_npz(f"{folder}/optimizer.npz", optimizer)
    COMM.barrier()
    last = RANK == SIZE - 1
    if not last:
        chainer.serializers.load_npz(f"{folder}/optimizer.npz", optimizer)
    with pytest.raises(ValueError, match="expected the same number of loads of optimizer state on every rank, got 1"):
        optimizer.consolidate()
    if last:
        chainer.serializers.load_npz(f"{folder}/optimizer.npz", optimizer)
    assert saved_by_all(optimizer)["middle/W/v"].shape == (7, 40)


@pytest.mark.skipif(SIZE < 2, reason="needs state on another rank")
def test_state_that_was_not_gathered_is_not_saved(folder):
    """Neither before the first consolidate() nor after a step or a load has made it obsolete, nor by another rank."""
    optimizer = make(sharded=True)
    train(optimizer, 3)

    def refused():
        with pytest.raises(
            RuntimeError, match=rf"expected optimizer\.consolidate\(to={RANK}\) on every rank, after the last step and"
        ):
            chainer.serializers.npz.serialize(optimizer)

    refused()
    saved = saved_by_all(optimizer)
    train(optimizer, 1)
    refused()
    optimizer.consolidate(to=SIZE - 1)
    if RANK != SIZE - 1:
        refused()
    chainer.serializers.NpzDeserializer(saved).load(optimizer)
    refused()
    with pytest.raises(
        ValueError, match=r"expected the same rank in consolidate\(\) on every rank, got 0 on rank 0 and"
    ):
        optimizer.consolidate(to=RANK)
    with pytest.raises(ValueError, match="root"):
        optimizer.consolidate(to=SIZE)
    train(optimizer, 1)
    same_everywhere(optimizer.target)


def test_consolidating_what_is_not_sharded_does_nothing():
    optimizer = make()
    train(optimizer, 3)
    before = {name: value.copy() for name, value in states(optimizer).items()}
    optimizer.consolidate()
    same(states(optimizer), before)
    with pytest.raises(RuntimeError, match="expected a model before consolidate"):
        MultiNodeOptimizer(chainer.optimizers.SGD(), COMM, Sharded()).consolidate()


@pytest.mark.skipif(SIZE < 2, reason="needs a rank that does not load")
def test_all_ranks_have_to_load(folder):
    """A rank that loads drops the state of other owners, which would start again."""
    optimizer = make(sharded=True)
    train(optimizer, 3)
    optimizer.consolidate()
    if RANK == 0:
        chainer.serializers.save_npz(f"{folder}/optimizer.npz", optimizer)
        resumed = make(sharded=True)
        chainer.serializers.load_npz(f"{folder}/optimizer.npz", resumed)
    else:
        resumed = make(sharded=True)
    with pytest.raises(ValueError, match="expected the same loading of optimizer state before the first step on every"):
        train(resumed, 2)


def test_threads_of_a_rank_save_at_once():
    optimizer = make(sharded=True)
    train(optimizer, 3)
    expected = saved_by_all(optimizer)
    for _ in range(20):
        with ThreadPoolExecutor(3) as pool:
            found = [pool.submit(chainer.serializers.npz.serialize, optimizer) for _ in range(3)]
        for each in found:
            assert each.result().keys() == expected.keys()
            for key, value in expected.items():
                np.testing.assert_array_equal(each.result()[key], value)


def test_several_ranks_save_at_once(folder):
    optimizer = make(sharded=True)
    train(optimizer, 4)
    saved = saved_by_all(optimizer)
    for other in COMM.allgather_obj(saved):
        assert other.keys() == saved.keys()
        for key, value in saved.items():
            np.testing.assert_array_equal(other[key], value)
    with optimizer.own_part():
        part = chainer.serializers.npz.serialize(optimizer)
    assert sum(len(each) for each in COMM.allgather_obj(states(optimizer))) == 2 * len(parameters(optimizer.target))
    assert {key for key in part if key.endswith("/v")} == {f"{key[1:]}" for key in states(optimizer) if key[-1] == "v"}


def test_hdf5(folder):
    pytest.importorskip("h5py")
    optimizer = make(sharded=True)
    train(optimizer, 4)
    optimizer.consolidate()
    if RANK == 0:
        chainer.serializers.save_hdf5(f"{folder}/optimizer.h5", optimizer)
    COMM.barrier()
    before = {name: value.copy() for name, value in states(optimizer).items()}
    train(optimizer, 2)
    chainer.serializers.load_hdf5(f"{folder}/optimizer.h5", optimizer)
    same(states(optimizer), before)


def test_a_part_of_another_rank_is_refused(folder):
    optimizer = make(sharded=True)
    train(optimizer, 3)
    with optimizer.own_part():
        chainer.serializers.save_npz(f"{folder}/part.{RANK}", optimizer)
    COMM.barrier()
    before = {name: value.copy() for name, value in states(optimizer).items()}
    train(optimizer, 2)
    chainer.serializers.load_npz(f"{folder}/part.{RANK}", optimizer)
    same(states(optimizer), before)
    if SIZE > 1:
        with pytest.raises(ValueError, match=rf"expected the optimizer state of rank {RANK} of {SIZE}, got that of"):
            chainer.serializers.load_npz(f"{folder}/part.{(RANK + 1) % SIZE}", optimizer)


class Seen:
    """A hook over all parameters that sums up what it sees."""

    def __init__(self, name, timing):
        self.name, self.timing = name, timing
        self.sums = []

    def __call__(self, optimizer):
        params = sorted(optimizer.target.namedparams())
        self.sums.append([[float(abs(a).sum()) for a in (p.data, p.grad)] for _, p in params])


class ClipWeights:
    """A hook that changes parameters, like that of Wasserstein GANs."""

    name, timing, call_for_each_param = "ClipWeights", "post", True

    def __call__(self, rule, param):
        param.data.clip(-0.3, 0.3, out=param.data)


def hooks_of(optimizer):
    hookable = optimizer._hookable
    return list(hookable._pre_update_hooks.items()), list(hookable._post_update_hooks.items())


def hooks(name):
    from chainer import optimizer_hooks

    return {
        "decay": lambda: [optimizer_hooks.WeightDecay(0.1)],
        "lasso": lambda: [optimizer_hooks.Lasso(0.01)],
        "lars": lambda: [optimizer_hooks.GradientLARS()],
        "clipping": lambda: [optimizer_hooks.GradientClipping(0.1)],
        "hard": lambda: [optimizer_hooks.GradientHardClipping(-0.01, 0.01)],
        "decay and clipping": lambda: [optimizer_hooks.WeightDecay(0.1), optimizer_hooks.GradientClipping(0.1)],
        "weights": lambda: [ClipWeights()],
        "seen before": lambda: [Seen("seen", "pre"), optimizer_hooks.WeightDecay(0.1)],
        "seen after": lambda: [Seen("seen", "post"), ClipWeights()],
    }[name]()


@pytest.mark.parametrize("dtype", ["f4", "mixed16"])
@pytest.mark.parametrize(
    "name",
    ["decay", "lasso", "lars", "clipping", "hard", "decay and clipping", "weights", "seen before", "seen after"],
)
def test_hooks(name, dtype):
    trained, sums = [], []
    for sharded in (False, True):
        actual = chainer.optimizers.MomentumSGD(0.1)
        actual.set_loss_scale(8)
        if dtype == "mixed16":
            actual.use_fp32_update()
        optimizer = make(actual, Net(dtype), sharded=sharded)
        added = hooks(name)
        for hook in added:
            optimizer.add_hook(hook)
        before = hooks_of(optimizer)
        with np.errstate(all="ignore"):
            train(optimizer, 8)
        assert hooks_of(optimizer) == before
        trained.append(parameters(optimizer.target))
        sums.append([hook.sums for hook in added if isinstance(hook, Seen)])
        same_everywhere(optimizer.target)
    same(trained[1], trained[0])
    assert sums[1] == sums[0]


def test_noise_is_that_of_the_owner():
    optimizer = make(chainer.optimizers.SGD(0.1), sharded=True)
    optimizer.add_hook(chainer.optimizer_hooks.GradientNoise(0.1))
    np.random.seed(RANK)
    train(optimizer, 4)
    same_everywhere(optimizer.target)


def test_hooks_of_one_rule():
    def trained(**options):
        optimizer = make(**options)
        calls = []
        rule = optimizer.target.middle.W.update_rule
        rule.add_hook(lambda rule, param: calls.append(rule.t) or param.grad.fill(1), name="count")
        rule.hyperparam.alpha = 0.1
        return parameters(train(optimizer, 4)), calls

    expected, calls = trained()
    actual, sharded = trained(sharded=True)
    same(actual, expected)
    assert sorted(COMM.allgather_obj(sharded)) == [[]] * (SIZE - 1) + [calls]


class Own:
    """A communication hook, which does not affect sharding."""

    def __call__(self, bucket):
        return bucket.average()


@pytest.mark.parametrize("communicator", ["naive", "flat", "hierarchical", "single_node", "non_cuda_aware"])
def test_communicators(communicator):
    comm = create_communicator(communicator)
    # MPI adds up more than two summands in its own order, and Adam takes a full step for any difference near zero.
    is_exact = SIZE <= 2 or communicator not in ("naive", "flat")
    actual_optimizer = chainer.optimizers.Adam if is_exact else chainer.optimizers.MomentumSGD
    expected = parameters(train(make(actual_optimizer(), comm=comm), 4))
    actual = parameters(train(make(actual_optimizer(), comm=comm, sharded=True), 4))
    if not is_exact:
        for name, data in expected.items():
            np.testing.assert_allclose(actual[name], data, rtol=1e-5, atol=1e-6)
    else:
        same(actual, expected)


def test_options_that_go_with_it():
    from mn_compress import Int8

    whens = [OneStepLate(), AfterBackward(send=Own()), AfterBackward(send=Int8()), AfterBackward(zero_fill=False)]
    for when in whens:
        expected = parameters(train(make(when=when), 6))
        optimizer = make(sharded=True, when=when)
        same(parameters(train(optimizer, 6)), expected)
        same_everywhere(optimizer.target)


@pytest.mark.parametrize("when", [LocalSGD(2), Asynchronous(), Sharded(), None, DuringBackward])
def test_options_that_do_not(when):
    with pytest.raises(TypeError, match=r"expected one of .*, OneStepLate\(\) for when"):
        Sharded(when)


def test_gradients_that_are_added_up():
    def run(**options):
        optimizer = make(**options)
        train(optimizer, 3)
        with optimizer.no_sync():
            train(optimizer, 2, first=3)
        assert optimizer.t == 2
        train(optimizer, 3, first=5)
        return optimizer

    compare(run)


def test_not_finite_on_one_rank():
    """All ranks skip the step, or none."""
    trained = []
    for sharded in (False, True):
        actual = chainer.optimizers.Adam()
        actual.loss_scaling(interval=2)
        optimizer = make(actual, sharded=sharded)
        train(optimizer, 3)
        for param in optimizer.target.params():
            param.grad = np.full_like(param.data, np.inf if RANK == SIZE - 1 else 1)
        with np.errstate(all="ignore"), pytest.warns(UserWarning, match="Non finite"):
            optimizer.update()
        train(optimizer, 3)
        trained.append((parameters(optimizer.target), optimizer.t, actual._loss_scale))
        rules = [param.update_rule for param in optimizer.target.params()]
        assert {rule.t for rule in rules} == {optimizer.t - 1}
    same(trained[1][0], trained[0][0])
    assert trained[1][1:] == trained[0][1:]


class SGDOfItsOwn(chainer.optimizers.SGD):
    """An optimizer that may do anything with gradients in its update."""

    def update(self, *args, **kwds):
        super().update(*args, **kwds)


def hook_over_all(timing):
    hook = Seen("seen", timing)
    return lambda optimizer: optimizer.add_hook(hook)


@WHEN
@pytest.mark.parametrize(
    ("actual", "prepare", "is_left"),
    [
        (chainer.optimizers.SGD, lambda optimizer: None, True),
        (chainer.optimizers.SGD, lambda o: o.add_hook(chainer.optimizer_hooks.GradientClipping(1)), True),
        (chainer.optimizers.SGD, lambda o: o.add_hook(chainer.optimizer_hooks.WeightDecay(0.1)), True),
        (chainer.optimizers.SGD, hook_over_all("pre"), False),
        (chainer.optimizers.SGD, hook_over_all("post"), False),
        (chainer.optimizers.SGD, lambda optimizer: optimizer.add_hook(ClipWeights()), False),
        (SGDOfItsOwn, lambda optimizer: None, False),
    ],
    ids=["nothing", "clipping", "decay", "before", "after", "weights", "own update"],
)
def test_where_the_means_are(actual, prepare, is_left, when):
    """Only on the ranks that need them, unless something may read all of them."""
    optimizer = make(actual(), sharded=True, when=when)
    prepare(optimizer)
    train(optimizer, 3)
    held = {name: param.grad for name, param in optimizer.target.namedparams() if (param.grad != 0).any()}
    owners = owners_in(optimizer)
    everyone = COMM.allgather_obj(held)
    for name in held:
        holders = [rank for rank, each in enumerate(everyone) if name in each]
        assert holders == ([owners[name]] if is_left else list(range(SIZE)))


@pytest.mark.parametrize("debug", [False, True])
def test_debug_mode_sees_all_means(debug):
    optimizer = make(sharded=True)
    with chainer.using_config("debug", debug):
        train(optimizer, 3)
    held = [bool((param.grad != 0).any()) for _, param in sorted(optimizer.target.namedparams())]
    assert all(held) == (debug or SIZE == 1)
    with chainer.using_config("debug", debug and RANK == 0):
        if debug and SIZE > 1:
            with pytest.raises(ValueError, match="expected the same owners of means on every rank"):
                train(optimizer, 1)
        else:
            train(optimizer, 1)
    train(optimizer, 1)
    same_everywhere(optimizer.target)


def test_several_norms():
    """Each clipping waits for all ranks, and sees the result of the previous one."""

    def run(**options):
        optimizer = make(chainer.optimizers.SGD(0.1), **options)
        for i, threshold in enumerate([0.5, 100, 0.2]):
            optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(threshold), name=f"clipping {i}")
            optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.01), name=f"decay {i}")
        train(optimizer, 6)
        return optimizer

    compare(run)


@WHEN
@pytest.mark.parametrize("clips", [False, True])
def test_join(clips, when):
    """Ranks without data send zeros, and update parameters."""

    def run(**options):
        optimizer = make(when=when, **options)
        if clips:
            optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(0.05))
        with optimizer.join():
            train(optimizer, [7, 3, 0, 5][RANK % 4])
        return optimizer

    compare(run)


def test_hooks_that_come_and_go():
    """Means are on the ranks that need them now, whatever was needed before."""

    def run(**options):
        optimizer = make(**options)
        changes = [
            lambda: optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(0.1)),
            lambda: optimizer.add_hook(Seen("seen", "pre")),
            lambda: optimizer.remove_hook("GradientClipping"),
            lambda: optimizer.remove_hook("seen"),
        ]
        for i, change in enumerate(changes):
            train(optimizer, 2, first=2 * i)
            change()
        train(optimizer, 2, first=8)
        return optimizer

    compare(run)


def test_gradients_that_a_script_writes_in_place():
    """Also gradients that were dropped because another rank updates the parameter."""

    def run(**options):
        optimizer = make(chainer.optimizers.MomentumSGD(0.1), **options)
        optimizer.target(*batch(0))
        optimizer.update()
        for step in range(5):
            random = np.random.RandomState(10 * step + RANK)
            for _, param in sorted(optimizer.target.namedparams()):
                if param.grad is None:
                    param.grad = np.zeros_like(param.data)
                param.grad[...] = random.rand(*param.shape)
            optimizer.update()
        return optimizer

    compare(run)


@pytest.mark.parametrize("where", ["first", "between", "last", "rule"])
def test_a_hook_that_fails_beside_clipping(where):
    """The other ranks wait for its part of the norms."""

    def fails(rule, param):
        if rule.t == 2 and RANK == SIZE - 1:
            raise LookupError("no hook")

    fails.call_for_each_param = True
    optimizer = make(sharded=True)
    names = [f"clipping {i}" for i in range(2)]
    names.insert({"first": 0, "between": 1}.get(where, 2), "fails")
    for name in names:
        if name != "fails":
            optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(0.1), name=name)
        elif where != "rule":
            optimizer.add_hook(fails, name=name)
    if where == "rule":
        for param in optimizer.target.params():
            param.update_rule.add_hook(lambda rule, param: fails(rule, param), name="fails")
    train(optimizer, 3 if where != "rule" else 2)
    with pytest.raises((LookupError, RuntimeError), match="no hook"):
        train(optimizer, 1)
    same_everywhere(optimizer.target)


@pytest.mark.skipif(SIZE < 2, reason="needs ranks that differ")
@pytest.mark.parametrize("what", ["clipping", "loss scaling"])
def test_optimizers_that_differ(what):
    optimizer = make(sharded=True)
    train(optimizer, 3)
    if RANK == SIZE - 1 and what == "clipping":
        optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1))
    elif RANK == SIZE - 1:
        optimizer.loss_scaling()
    with pytest.raises(ValueError, match=r"expected the same owners of means on every rank, got 0 GradientClipping on"):
        train(optimizer, 1)


class FailingRule(chainer.optimizers.sgd.SGDRule):
    """A rule that fails in its second step."""

    def update_core(self, param):
        if self.t == 2:
            raise ArithmeticError("2 is too much")
        super().update_core(param)


def test_a_step_that_fails_on_one_rank():
    optimizer = make(chainer.optimizers.SGD(0.1), sharded=True)
    optimizer.target.middle.b.update_rule = FailingRule(optimizer.hyperparam)
    train(optimizer, 2)
    with pytest.raises(ArithmeticError, match=r"2 is too much") as caught:
        train(optimizer, 1)
    raised_here = COMM.allgather_obj(getattr(caught.value, "raised_on_rank", None) is None)
    assert sum(raised_here) == 1
    same_everywhere(optimizer.target)
    assert all("update" not in vars(param.update_rule) for param in optimizer.target.params())
    before = parameters(optimizer.target)
    train(optimizer, 1)
    same_everywhere(optimizer.target)
    assert any((data != before[name]).any() for name, data in parameters(optimizer.target).items())


class ReadsAll(chainer.optimizers.SGD):
    """An optimizer whose rules refer to the whole model."""

    def setup(self, link):
        super().setup(link)
        for param in link.params():
            param.update_rule.all = list(link.params())
        return self


def test_rules_that_read_other_parameters():
    optimizer = make(ReadsAll(), sharded=True)
    with pytest.raises(TypeError, match=r"expected update rules that read only their own parameter, but SGDRule of /"):
        train(optimizer, 2)
    optimizer = make(chainer.optimizers.SGD(), sharded=True)
    model = optimizer.target
    if RANK == SIZE - 1:  # all ranks are informed
        model.first.W.update_rule.add_hook(lambda rule, param: model.cleargrads(), name="clear")
    with pytest.raises(TypeError, match="expected update rules that read only their own parameter"):
        train(optimizer, 2)


class WithoutRules(chainer.Optimizer):
    """An optimizer that does everything by itself."""

    def update(self, lossfun=None, *args, **kwds):
        for param in self.target.params():
            param.data -= param.grad


def test_optimizers_without_rules():
    optimizer = make(WithoutRules(), sharded=True)
    with pytest.raises(TypeError, match="expected an optimizer that has an update rule for each parameter"):
        train(optimizer, 2)


def test_frozen_parameters():
    trained = []
    for sharded in (False, True):
        optimizer = make(sharded=sharded)
        optimizer.target.first.disable_update()
        optimizer.target.norm.beta.update_rule = None
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.1))
        train(optimizer, 4)
        assert not any(key.startswith(("/first", "/norm/beta")) for key in states(optimizer))
        optimizer.target.first.enable_update()
        optimizer.target.last.disable_update()
        train(optimizer, 4, first=4)
        trained.append(optimizer)
    same(parameters(trained[1].target), parameters(trained[0].target))
    check_divided(trained[1], trained[0])
    owners = owners_in(trained[1])
    # Parameters that are trained at first are divided separately: no rank has only frozen parameters.
    assert len({owners[name] for name in owners if not name.startswith("/first")}) == min(SIZE, 9)


def test_a_hook_that_freezes_and_thaws():
    """A parameter that it thaws is updated in the same step, and only its owner has the state."""

    def freeze(optimizer):
        if optimizer.t in (3, 6):
            for name in ("first", "lazy", "last"):
                for param in optimizer.target[name].params():
                    param.update_rule.enabled = optimizer.t == 6

    def run(**options):
        optimizer = make(**options)
        optimizer.add_hook(freeze, name="freeze")
        train(optimizer, 9)
        return optimizer

    check_divided(*compare(run))


def test_a_model_that_changes():
    trained = []
    for sharded in (False, True):
        optimizer = make(sharded=sharded)
        train(optimizer, 4)
        had = states(optimizer).keys()
        with optimizer.target.init_scope():
            optimizer.target.extra = L.Linear(3, 30, initialW=0.5)
        for param in optimizer.target.extra.params():
            param.update_rule = optimizer.create_update_rule()
        del optimizer.target.norm.beta
        optimizer.target.norm._params.discard("beta")
        if sharded and RANK == 0:
            with pytest.warns(
                RuntimeWarning, match=r"the model has changed while .* \(3 parameters came or went, the f"
            ):
                train(optimizer, 3)
        else:
            train(optimizer, 3)
        train(optimizer, 3)
        assert had - {"/norm/beta/m", "/norm/beta/v"} <= states(optimizer).keys()
        trained.append(optimizer)
    same(parameters(trained[1].target), parameters(trained[0].target))
    check_divided(trained[1], trained[0])


def test_a_rule_that_comes_later():
    """No rank can be sure that the others have it, too: all update the parameter, until owners are chosen again."""

    def run(**options):
        optimizer = make(**options)
        optimizer.target.first.W.update_rule = None
        train(optimizer, 3)
        optimizer.target.first.W.update_rule = optimizer.create_update_rule()
        train(optimizer, 3)
        return optimizer

    compare(run)


class Shared(chainer.Chain):
    """Has a link under two names, parameters in the same memory, and a parameter without elements."""

    def __init__(self):
        super().__init__()
        random = np.random.RandomState(1)
        with self.init_scope():
            self.one = L.Linear(5, 5, initialW=random.rand(5, 5).astype("f4"))
            self.two = self.one
            self.three = L.Linear(5, 5)
            self.four = L.Linear(5, 3, initialW=random.rand(3, 5).astype("f4"))
            self.empty = chainer.Parameter(np.zeros((0, 3), "f4"))
            self.scalar = chainer.Parameter(np.array(2, "f4"))
            self.half = chainer.Parameter(np.ones(3, "f2"))
            self.none = chainer.Chain()
        self.three.W.array = self.one.W.array
        self.scalar.array = np.array(2, "f4")

    def forward(self, x, t):
        h = self.four(F.tanh(self.three(F.tanh(self.two(F.tanh(self.one(x)))))))
        scale = F.cast(F.sum(self.half), "f4") * self.scalar
        return F.softmax_cross_entropy(h * F.broadcast_to(scale, h.shape), t)


@WHEN
def test_parameters_in_the_same_memory(when):
    trained = []
    for sharded in (False, True):
        optimizer = make(chainer.optimizers.Adam(), Shared(), sharded=sharded, when=when)
        with np.errstate(all="ignore"):
            train(optimizer, 8)
        trained.append(optimizer)
        model = optimizer.target
        assert model.one.W.array is model.three.W.array
    same(parameters(trained[1].target), parameters(trained[0].target))
    owners = owners_in(trained[1])
    assert owners["/one/W"] == owners["/two/W"] == owners["/three/W"]
    same_everywhere(trained[1].target)


class One(chainer.Link):
    """A single parameter, of half precision."""

    def __init__(self, n_params):
        super().__init__()
        with self.init_scope():
            for i in range(n_params):
                setattr(self, f"p{i}", chainer.Parameter(np.linspace(0, 1, 7).astype("f2")))

    def forward(self, x, t):
        return sum((F.sum(param * param) for param in self.params()), chainer.Variable(np.zeros((), "f2")))


@pytest.mark.parametrize("n_params", [0, 1])
def test_fewer_parameters_than_ranks(n_params):
    expected = train(make(model=One(n_params)), 5)
    optimizer = make(model=One(n_params), sharded=True)
    same(parameters(train(optimizer, 5)), parameters(expected))
    assert sum(len(each) for each in COMM.allgather_obj(states(optimizer))) == 2 * n_params


def test_two_optimizers():
    """Like those of a generator and a discriminator; each is gathered separately."""
    optimizers = [make(sharded=True), make(chainer.optimizers.MomentumSGD(), sharded=True)]
    expected = [make(), make(chainer.optimizers.MomentumSGD())]
    for iteration in range(4):
        for each in (*optimizers, *expected):
            train(each, 1, first=iteration)
    for optimizer, other in zip(optimizers, expected, strict=True):
        same(parameters(optimizer.target), parameters(other.target))
        saved, plain = (saved_by_all(each) for each in (optimizer, other))
        assert saved.keys() == plain.keys()
        for key, value in plain.items():
            np.testing.assert_array_equal(saved[key], value)


def test_derived_links_and_new_setup():
    optimizer = make(sharded=True)
    train(optimizer, 3)
    optimizer.setup(Net())
    expected = make()
    train(expected, 3)
    expected.setup(Net())
    same(parameters(train(optimizer, 4)), parameters(train(expected, 4)))
    check_divided(optimizer, expected)


class Tied(chainer.Link):
    """Two parameters; one rank may make them share memory."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.a = chainer.Parameter(np.ones(4, "f4"))
            self.b = chainer.Parameter(np.ones(4, "f4"))

    def forward(self, x, t):
        return F.sum(self.a * self.a + self.b)


@pytest.mark.skipif(SIZE < 2, reason="needs two owners")
def test_parameters_that_come_to_share_memory_on_one_rank_only():
    optimizer = make(model=Tied(), sharded=True)
    train(optimizer, 3)
    if RANK == SIZE - 1:
        optimizer.target.b.array = optimizer.target.a.array
    with pytest.raises(ValueError, match=r"expected parameters that share memory, or an update rule, to do so before"):
        train(optimizer, 1)
    if RANK == SIZE - 1:
        optimizer.target.b.array = optimizer.target.b.array.copy()
    train(optimizer, 2)
    same_everywhere(optimizer.target)


@pytest.mark.skipif(SIZE < 2, reason="needs two owners")
def test_parameters_that_come_to_share_an_update_rule():
    """The rule of one parameter would be needed by a rank that does not update that parameter."""
    optimizer = make(model=Tied(), sharded=True)
    train(optimizer, 3)
    optimizer.target.b.update_rule = optimizer.target.a.update_rule
    with pytest.raises(ValueError, match=r"expected parameters that share memory, or an update rule, to do so before"):
        train(optimizer, 1)
    train(optimizer, 2)
    same_everywhere(optimizer.target)
    assert len(set(owners_in(optimizer).values())) == 1


@pytest.mark.skipif(SIZE < 2, reason="needs two owners")
@pytest.mark.parametrize("timing", ["pre", "post"])
def test_a_hook_that_saves(timing):
    """Every rank runs the hook, and gathers in it. What was gathered before the step is not saved in it."""
    saved = []

    def trained(gathers, **options):
        optimizer = make(**options)
        train(optimizer, 3)
        optimizer.consolidate()

        def save(actual):
            if gathers:
                optimizer.consolidate()
            if RANK == 0:
                saved.append(
                    {key: np.array(each) for key, each in chainer.serializers.npz.serialize(optimizer).items()}
                )

        save.timing = timing
        optimizer.add_hook(save, name="save")
        train(optimizer, 1)

    trained(gathers=True)
    trained(gathers=True, sharded=True)
    if RANK == 0:
        same(saved[1], saved[0])
    if RANK == 0 or timing == "pre":  # all ranks are informed
        with pytest.raises(RuntimeError, match=r"expected optimizer\.consolidate\(to=0\) on every rank"):
            trained(gathers=False, sharded=True)
    else:
        trained(gathers=False, sharded=True)


@pytest.mark.skipif(SIZE < 2, reason="needs two owners")
def test_parameters_that_are_tied_go_on_with_one_owner():
    optimizer = make(model=Tied(), sharded=True)
    train(optimizer, 3)
    assert COMM.allgather_obj(len(states(optimizer)))[:2] == [2, 2]
    optimizer.target.b.array = optimizer.target.a.array
    with pytest.raises(ValueError, match="expected parameters that share memory"):
        train(optimizer, 1)
    train(optimizer, 3)
    same_everywhere(optimizer.target)
    assert COMM.allgather_obj(len(states(optimizer)))[:2] == [4, 0]


@pytest.mark.skipif(SIZE < 2, reason="needs ranks that differ")
@pytest.mark.parametrize("when", [0, 3])
def test_ranks_that_freeze_different_parameters(when):
    optimizer = make(sharded=True)
    train(optimizer, when)
    if RANK == SIZE - 1:
        optimizer.target.first.disable_update()
    with pytest.raises(ValueError, match="all_gather_owned: expected the same parameters on every rank"):
        train(optimizer, 2)
    optimizer.target.first.enable_update()
    train(optimizer, 2)
    same_everywhere(optimizer.target)


@pytest.mark.skipif(SIZE < 2, reason="needs ranks that differ")
def test_a_rule_that_one_rank_has_not():
    optimizer = make(sharded=True)
    if RANK == SIZE - 1:
        optimizer.target.first.W.update_rule = None
    with pytest.raises(ValueError, match="expected the same parameters with update rules on every rank"):
        train(optimizer, 2)


def test_a_hook_that_fails_on_one_rank():
    optimizer = make(sharded=True)

    def fails(optimizer):
        if optimizer.t == 2 and RANK == SIZE - 1:
            raise LookupError("no hook")

    optimizer.add_hook(fails, name="fails")
    train(optimizer, 3)
    with pytest.raises((LookupError, RuntimeError), match="no hook"):
        train(optimizer, 1)
    same_everywhere(optimizer.target)


def test_only_the_rank_that_saves_holds_the_whole_state():
    """And it holds the state of other ranks once: 20 MiB of 40; another rank sends what it has without a copy."""
    import tracemalloc

    model = chainer.Link()
    with model.init_scope():
        for i in range(20):
            setattr(model, f"p{i}", chainer.Parameter(np.ones((256, 1024), "f4")))
    optimizer = make(model=model, sharded=True)
    for _ in range(2):
        for param in model.params():
            param.grad = np.full_like(param.data, RANK)
        optimizer.update()
    tracemalloc.start()
    optimizer.consolidate()
    if RANK == 0:
        saved = chainer.serializers.npz.serialize(optimizer)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    foreign = 40 * (SIZE - 1) / SIZE if RANK == 0 else 0
    assert kept < (foreign + 2) * 2**20
    assert peak < (foreign + 4) * 2**20
    if RANK == 0:
        np.testing.assert_array_equal(saved["p0/m"][0, 0], saved["p19/m"][-1, -1])
        assert sum(value.nbytes for value in saved.values()) > 40 * 2**20
