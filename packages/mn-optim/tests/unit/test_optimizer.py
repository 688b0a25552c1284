import copy
import inspect

import chainer
import chainer.links as L
import numpy as np
import pytest

import mn_optim  # before Chainer
from mn_comm import CommunicatorBase, create_communicator
from mn_optim import DuringBackward, MultiNodeOptimizer, SynchronousFirst, create_multi_node_optimizer


@pytest.fixture
def comm():
    communicator = create_communicator("naive")
    yield communicator
    communicator.finalize()


def test_attributes_are_those_of_the_actual_optimizer(comm):
    actual = chainer.optimizers.SGD(lr=0.1)
    optimizer = create_multi_node_optimizer(actual, comm)
    assert optimizer.lr == 0.1
    optimizer.lr = 0.2
    assert actual.lr == 0.2
    assert optimizer.actual_optimizer is actual
    assert optimizer.communicator is comm
    with pytest.raises(AttributeError):
        _ = optimizer.nonsense


def test_setup_returns_the_multi_node_optimizer(comm):
    model = L.Linear(2, 3)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
    assert optimizer.setup(model) is optimizer
    assert optimizer.target is model


def test_hooks_and_serializing_go_to_the_actual_optimizer(comm, tmp_path):
    model = L.Linear(2, 3)
    optimizer = create_multi_node_optimizer(chainer.optimizers.MomentumSGD(), comm).setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.1))
    model.W.grad = np.ones_like(model.W.data)
    model.b.grad = np.ones_like(model.b.data)
    optimizer.update()
    optimizer.update()
    assert optimizer.t == 1
    chainer.serializers.save_npz(tmp_path / "state.npz", optimizer)
    other = create_multi_node_optimizer(chainer.optimizers.MomentumSGD(), comm).setup(L.Linear(2, 3))
    chainer.serializers.load_npz(tmp_path / "state.npz", other)
    assert other.t == 1


def test_what_it_has_seen_of_the_model(comm):
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm, zero_fill=False).setup(L.Linear(3))
    assert optimizer.target_params == []
    assert optimizer.zero_fill is False
    assert MultiNodeOptimizer(chainer.optimizers.SGD(), comm, DuringBackward()).zero_fill is True
    assert optimizer.is_changed(optimizer.target)
    assert optimizer.target_params == [("/W", False), ("/b", True)]
    assert not optimizer.is_changed(optimizer.target)
    optimizer.target(np.zeros((1, 2), "f4"))
    assert optimizer.is_changed(optimizer.target)
    assert optimizer.target_params == [("/W", True), ("/b", True)]
    optimizer.note = 1
    assert optimizer.actual_optimizer.note == 1


def test_an_update_that_is_done_by_hand_before_takes_a_step(comm):
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(L.Linear(2, 3))
    optimizer.target.cleargrads()
    optimizer.is_changed(optimizer.target)
    optimizer.update()
    assert optimizer.t == 1


def test_an_optimizer_derived_from_it(comm):
    class Counting(mn_optim.MultiNodeOptimizer):
        """As in public programs for ChainerMN 7."""

        def __init__(self, actual_optimizer, communicator, zero_fill=True):
            super().__init__(actual_optimizer, communicator, zero_fill)
            object.__setattr__(self, "averaged", 0)

        def update(self, lossfun=None, *args, **kwds):
            target = self.target
            if self.is_changed(target):
                self.communicator.bcast_data(target)
            else:
                self.communicator.multi_node_mean_grad(target, self.zero_fill)
                object.__setattr__(self, "averaged", self.averaged + 1)
                self.actual_optimizer.update(None, *args, **kwds)

    optimizer = Counting(chainer.optimizers.SGD(), comm).setup(L.Linear(2, 3))
    optimizer.target.cleargrads()
    for _ in range(3):
        optimizer.update()
    assert (optimizer.t, optimizer.averaged) == (2, 2)
    super(Counting, optimizer).update()
    assert optimizer.t == 3


def test_it_can_be_copied(comm):
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(lr=0.3), comm)
    assert copy.copy(optimizer).lr == 0.3


@pytest.mark.parametrize("wrong", [None, "SGD", chainer.optimizers.SGD, L.Linear(1, 1)])
def test_an_optimizer_that_is_not_one(comm, wrong):
    with pytest.raises(TypeError, match=r"expected a chainer.Optimizer for actual_optimizer, or"):
        create_multi_node_optimizer(wrong, comm)


def test_arguments_in_the_wrong_order(comm):
    with pytest.raises(TypeError, match="got NaiveCommunicator"):
        create_multi_node_optimizer(comm, chainer.optimizers.SGD())


def test_update_without_a_model(comm):
    with pytest.raises(RuntimeError, match=r"call setup\(model\)"):
        create_multi_node_optimizer(chainer.optimizers.SGD(), comm).update()


def test_options_that_exclude_one_another_cannot_be_written(comm):
    names = list(inspect.signature(create_multi_node_optimizer).parameters)
    assert names == ["actual_optimizer", "communicator", "double_buffering", "zero_fill"]  # those of ChainerMN 7
    for when in ({"zero_fill": False, "bucket_bytes": 1}, {"compression": None, "comm_hook": None}):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            DuringBackward(**when)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        mn_optim.Asynchronous(send=None)
    for wrong in (DuringBackward, None, "overlap", 2):
        with pytest.raises(TypeError, match=r"expected AfterBackward\(\) or alike for when, got"):
            MultiNodeOptimizer(chainer.optimizers.SGD(), comm, wrong)
    with pytest.raises(TypeError, match="for then, got SynchronousFirst"):
        SynchronousFirst(1, SynchronousFirst(1, mn_optim.LocalSGD(2)))
    with pytest.raises(TypeError, match="for first, got LocalSGD"):
        SynchronousFirst(1, mn_optim.LocalSGD(2), first=mn_optim.LocalSGD(2))


def test_a_communicator_that_cannot_average_in_the_background():
    class Other(CommunicatorBase):
        """Has the ranks of one process."""

        def allgather_obj(self, obj):
            return [obj]

    Other.__abstractmethods__ = frozenset()
    with pytest.raises(NotImplementedError, match="Other cannot average gradients in the background"):
        MultiNodeOptimizer(chainer.optimizers.SGD(), Other(), DuringBackward())


def test_public_names():
    assert set(mn_optim.__all__) == {
        *("AfterBackward", "DuringBackward", "OneStepLate", "Sharded", "SynchronousFirst", "When"),
        *("Asynchronous", "DiLoCo", "LocalSGD", "StreamingDiLoCo"),
        *("MultiNodeOptimizer", "MultiNodeUpdater", "create_multi_node_optimizer"),
        *("LAMB", "RMSpropWarmup", "RMSpropWarmupSchedule", "sgd_share"),
        *("SLOW_START", "LearningRateSchedule", "gradual_warmup", "linear_scaling", "piecewise"),
        "keep_last_statistics",
    }
