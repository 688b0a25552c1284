"""Optimizer state that is divided among the ranks: nothing but the memory differs."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import mn_optim  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_optim import create_multi_node_optimizer

COMM = create_communicator("two_dimensional")
RANK, SIZE = COMM.rank, COMM.size
OPTIMIZERS = {
    "AdaDelta": chainer.optimizers.AdaDelta,
    "AdaGrad": chainer.optimizers.AdaGrad,
    "Adam": lambda: chainer.optimizers.Adam(weight_decay_rate=0.1),
    "AdamW": chainer.optimizers.AdamW,
    "AMSGrad": chainer.optimizers.AMSGrad,
    "AdaBound": chainer.optimizers.AdaBound,
    "AMSBound": chainer.optimizers.AMSBound,
    "CorrectedMomentumSGD": chainer.optimizers.CorrectedMomentumSGD,
    "MomentumSGD": chainer.optimizers.MomentumSGD,
    "MSVAG": chainer.optimizers.MSVAG,
    "NesterovAG": chainer.optimizers.NesterovAG,
    "RMSprop": chainer.optimizers.RMSprop,
    "RMSpropGraves": chainer.optimizers.RMSpropGraves,
    "SGD": chainer.optimizers.SGD,
    "SMORMS3": chainer.optimizers.SMORMS3,
}


def test_every_optimizer_of_chainer_is_tried():
    kinds = {
        name
        for name, kind in vars(chainer.optimizers).items()
        if isinstance(kind, type) and issubclass(kind, chainer.optimizer.GradientMethod)
    }
    assert kinds == set(OPTIMIZERS)


class Net(chainer.Chain):
    """A chain, so that gradients become final in the same order in every run; with one parameter larger than the rest.

    Args:
        dtype: Of the parameters.
        n_last: How large the last link is.
    """

    def __init__(self, dtype="f4", n_last=3):
        super().__init__()
        initial = chainer.initializers.LeCunNormal(rng=np.random.RandomState(0))
        with chainer.using_config("dtype", {"f4": np.float32, "mixed16": chainer.mixed16}[dtype]), self.init_scope():
            self.first = L.Linear(5, 40, initialW=initial)
            self.norm = L.BatchNormalization(40)
            self.middle = L.Linear(40, 7, initialW=initial)
            self.lazy = L.Linear(None, 6, initialW=initial)
            self.last = L.Linear(6, n_last, initialW=initial)
        self.dtype = chainer.get_dtype() if dtype == "f4" else np.float16

    def forward(self, x, t):
        h = F.relu(self.norm(self.first(x.astype(self.dtype))))
        return F.softmax_cross_entropy(self.last(F.tanh(self.lazy(F.tanh(self.middle(h))))), t)


def batch(iteration, rank=RANK):
    random = np.random.RandomState(100 * iteration + rank)
    return random.rand(6, 5).astype("f4"), random.randint(0, 3, 6).astype("i4")


def parameters(model):
    return {name: param.data.copy() for name, param in model.namedparams()}


def same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, data in expected.items():
        assert actual[name].dtype == data.dtype
        np.testing.assert_array_equal(actual[name], data, err_msg=name)


def same_everywhere(model):
    for other in COMM.allgather_obj(parameters(model)):
        same(other, parameters(model))


def train(optimizer, steps=20, first=0):
    for iteration in range(first, first + steps):
        optimizer.update(optimizer.target, *batch(iteration))
    return optimizer.target


def make(actual=None, model=None, comm=COMM, **options):
    actual = chainer.optimizers.Adam() if actual is None else actual
    return create_multi_node_optimizer(actual, comm, **options).setup(Net() if model is None else model)


def states(optimizer):
    """Return the arrays of the state that this rank has, by name."""
    return {
        f"{name}/{key}": value
        for name, param in optimizer.target.namedparams()
        for key, value in (param.update_rule.state or {}).items()
        if isinstance(value, np.ndarray)
    }


def check_divided(optimizer, expected):
    """See that the ranks have, together, the state that an optimizer has which is not sharded, each array once."""
    found = {}
    for each in COMM.allgather_obj(states(optimizer)):
        assert not found.keys() & each.keys()
        found.update(each)
    same(found, states(expected))


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("dtype", ["f4", "mixed16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_is_unsharded(name, dtype, overlap):
    trained = []
    for sharded in (False, True):
        actual = OPTIMIZERS[name]()
        if dtype == "mixed16":
            actual.use_fp32_update()
            actual.loss_scaling(interval=3)
        optimizer = make(actual, Net(dtype), shard_state=sharded, overlap=overlap)
        with np.errstate(all="ignore"):
            train(optimizer)
        trained.append(optimizer)
    expected, actual = trained
    assert actual.t == expected.t >= 18
    assert actual._loss_scale == expected._loss_scale
    same(parameters(actual.target), parameters(expected.target))
    same_everywhere(actual.target)
    check_divided(actual, expected)
    for (key, param), (_, other) in zip(actual.target.namedparams(), expected.target.namedparams(), strict=True):
        assert param.update_rule.t == other.update_rule.t, key
    masters = [param.update_rule._fp32_param is not None for _, param in sorted(actual.target.namedparams())]
    has_master = dtype == "mixed16"
    halves = [param.dtype == np.float16 for _, param in sorted(actual.target.namedparams())]
    assert [sum(each) for each in zip(*COMM.allgather_obj(masters), strict=True)] == [has_master * h for h in halves]


@pytest.fixture
def folder(tmp_path_factory):
    return COMM.bcast_obj(str(tmp_path_factory.mktemp("run")) if RANK == 0 else None)


def test_a_rank_saves_alone_what_all_have(folder):
    """As Chainer's own snapshot does, of which the other ranks know nothing: they are in the next step already."""
    unsharded = make()
    train(unsharded, 5)
    optimizer = make(shard_state=True)
    train(optimizer, 5)
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
    for wrap in (lambda o: make(o, shard_state=True), make):  # sharded again, and not
        resumed = wrap(chainer.optimizers.Adam())
        resumed.target(*batch(0))  # so that the last parameters are there
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


def test_what_is_loaded_of_others_is_dropped(folder):
    optimizer = make(shard_state=True)
    train(optimizer, 3)
    if RANK == 0:
        chainer.serializers.save_npz(f"{folder}/optimizer.npz", optimizer)
    COMM.barrier()
    expected = {name: value.copy() for name, value in states(optimizer).items()}
    train(optimizer, 3)
    chainer.serializers.load_npz(f"{folder}/optimizer.npz", optimizer)  # while it runs
    same(states(optimizer), expected)
    assert optimizer.t == 2
    other = make(shard_state=True)
    other.target(*batch(0))
    chainer.serializers.load_npz(f"{folder}/optimizer.npz", other)
    same(states(other), expected)
    if RANK == 0:  # before the first step, it is still where it was loaded
        chainer.serializers.save_npz(f"{folder}/again.npz", other)
        with np.load(f"{folder}/again.npz") as again, np.load(f"{folder}/optimizer.npz") as first:
            assert set(again) == set(first)
            for key in first:
                np.testing.assert_array_equal(again[key], first[key])
    COMM.barrier()


def test_several_ranks_save_at_once(folder):
    optimizer = make(shard_state=True)
    train(optimizer, 4)
    saved = chainer.serializers.npz.serialize(optimizer)
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
    optimizer = make(shard_state=True)
    train(optimizer, 4)
    if RANK == 0:
        chainer.serializers.save_hdf5(f"{folder}/optimizer.h5", optimizer)
    COMM.barrier()
    before = {name: value.copy() for name, value in states(optimizer).items()}
    train(optimizer, 2)
    chainer.serializers.load_hdf5(f"{folder}/optimizer.h5", optimizer)
    same(states(optimizer), before)


def test_a_part_of_another_rank_is_refused(folder):
    optimizer = make(shard_state=True)
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
