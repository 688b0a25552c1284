import chainer
import numpy as np
import pytest
from chainer.training import extensions

import mn_extensions  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_extensions import GenericMultiNodeEvaluator, create_multi_node_evaluator
from mn_extensions.evaluator import weighted_mean

COMM = create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size
VALUES = (np.random.RandomState(0).rand(10) * 7).astype("f4")


class Report(chainer.Link):
    def forward(self, x):
        chainer.report({"value": x.mean(), "right": (x > 3).mean()}, self)


def evaluator(values, batchsize=1, cls=extensions.Evaluator):
    return cls(chainer.iterators.SerialIterator(values, batchsize, repeat=False, shuffle=False), Report())


def part(rank=RANK, size=SIZE):
    return VALUES[rank * 10 // size : (rank + 1) * 10 // size]


def test_ten_samples_weighted_are_what_one_process_gets():
    alone = COMM.split(RANK, 0)
    expected = create_multi_node_evaluator(evaluator(VALUES), alone, weighted=True)()
    found = create_multi_node_evaluator(evaluator(part()), COMM, weighted=True)()
    assert found == expected
    assert {name: value.dtype for name, value in found.items()} == {"main/value": "f4", "main/right": "f8"}
    alone.finalize()
    plain = evaluator(VALUES)()
    assert found["main/right"] == plain["main/right"]
    np.testing.assert_allclose(found["main/value"], plain["main/value"], rtol=1e-6)


@pytest.mark.parametrize("batchsize", [2, 3, 4, 100])
def test_batches_of_any_size(batchsize):
    found = create_multi_node_evaluator(evaluator(part(), batchsize), COMM, weighted=True)()
    np.testing.assert_allclose(found["main/value"], VALUES.mean(dtype="f8"), rtol=1e-6)
    np.testing.assert_allclose(found["main/right"], (VALUES > 3).mean(), rtol=1e-12)


def test_the_default_is_the_plain_mean_over_ranks():
    found = create_multi_node_evaluator(evaluator(part()), COMM)()
    expected = sum(evaluator(part(rank))()["main/value"] for rank in range(SIZE)) / SIZE
    assert found["main/value"] == expected


def test_more_ranks_than_samples():
    mine = VALUES[:1] if RANK == SIZE - 1 else VALUES[:0]
    found = create_multi_node_evaluator(evaluator(mine), COMM, weighted=True)()
    assert found["main/value"] == VALUES[0]


def test_an_evaluate_of_its_own():
    class Own(extensions.Evaluator):
        def evaluate(self):
            return {"main/value": self.get_iterator("main").dataset.mean()}

    found = create_multi_node_evaluator(evaluator(part(), cls=Own), COMM, weighted=True)()
    np.testing.assert_allclose(found["main/value"], VALUES.mean(dtype="f8"), rtol=1e-6)


def test_hooks_and_functions_of_the_evaluator_are_called():
    seen = []
    each = extensions.Evaluator(
        chainer.iterators.SerialIterator(chainer.datasets.DictDataset(x=VALUES), 5, repeat=False, shuffle=False),
        Report(),
        eval_hook=lambda e: seen.append("hook"),
        eval_func=lambda x: chainer.report({"main/value": chainer.functions.sum(chainer.Variable(x))}),
    )
    found = create_multi_node_evaluator(each, COMM, weighted=True)()
    np.testing.assert_allclose(found["main/value"], VALUES.sum() / 2, rtol=1e-6)
    assert seen == ["hook"]


def test_a_converter_that_takes_the_number_of_a_device():
    devices = []

    def converter(batch, device):
        devices.append(device)
        return np.stack(batch)

    iterator = chainer.iterators.SerialIterator(part(), 4, repeat=False, shuffle=False)
    each = extensions.Evaluator(iterator, Report(), converter, device=-1)
    found = create_multi_node_evaluator(each, COMM, weighted=True)()
    np.testing.assert_allclose(found["main/value"], VALUES.mean(dtype="f8"), rtol=1e-6)
    assert set(devices) == {-1}


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_values_that_are_not_finite(wrong):
    assert np.isfinite(weighted_mean([(np.float32(1), 3), (2.0, 1)]))
    np.testing.assert_equal(weighted_mean([(np.float32(wrong), 3), (np.float32(-wrong), 1)]), np.float32(np.nan))
    np.testing.assert_allclose(weighted_mean([(np.ones(2), 1), (np.zeros(2), 3)]), [0.25, 0.25])


def test_an_error_on_one_rank_raises_on_all():
    each = create_multi_node_evaluator(evaluator([None] if RANK == SIZE - 1 else VALUES), COMM, weighted=True)
    with pytest.raises(Exception, match=r"None|rank|object"):
        each()


class Generic(GenericMultiNodeEvaluator):
    def calc_local(self, x):
        return x.tolist()

    def aggregate(self, results):
        return results


def generic(values, batchsize=2, cls=Generic, **kwds):
    return cls(COMM, chainer.iterators.SerialIterator(values, batchsize, repeat=False, shuffle=False), None, **kwds)


@pytest.mark.parametrize("root", [0, SIZE - 1])
def test_generic_evaluators_put_all_results_together_in_turn(root):
    mine = np.arange(3 + RANK) + 100 * RANK
    seen = []
    each = generic(mine, root=root, progress_hook=seen.append)
    for _ in range(2):
        found = each(None)
    if RANK == root:
        batches = [[list(range(100 * r, 100 * r + 3 + r))[i : i + 2] for i in range(0, 3 + r, 2)] for r in range(SIZE)]
        expected = [batch[i] for i in range(max(map(len, batches))) for batch in batches if i < len(batch)]
        assert found == expected
        assert len(seen) == 2 * len(batches[RANK])
    else:
        assert found is None
        assert seen == []


def test_generic_evaluators_call_the_target_by_default():
    iterator = chainer.iterators.SerialIterator(VALUES, 5, repeat=False, shuffle=False)
    found = GenericMultiNodeEvaluator(COMM, iterator, lambda x: float(x.sum()))(None)
    if RANK == 0:
        np.testing.assert_allclose(sum(found), SIZE * VALUES.sum(), rtol=1e-5)


@pytest.mark.parametrize("where", ["calc_local", "aggregate"])
def test_errors_of_generic_evaluators_raise_on_all(where):
    def fail(self, *args):
        if where == "aggregate" or RANK == SIZE - 1:
            raise ValueError("broken")
        return 1

    with pytest.raises(ValueError, match="broken"):
        generic(VALUES, cls=type("Broken", (Generic,), {where: fail}))(None)


def test_generic_evaluators_check_the_root():
    with pytest.raises(ValueError, match="expected root in"):
        generic(VALUES, root=SIZE)
