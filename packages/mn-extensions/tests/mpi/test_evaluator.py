import chainer
import numpy as np
import pytest
from chainer.training import extensions

import mn_extensions  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_extensions import create_multi_node_evaluator

COMM = create_communicator("naive")
RANK, SIZE = COMM.rank, COMM.size

VALUES = np.arange(12 * SIZE, dtype="f4") ** 1.5


class Report(chainer.Link):
    def forward(self, x):
        chainer.report({"value": x.mean()}, self)


def evaluator(values, cls=extensions.Evaluator):
    model = Report()
    iterator = chainer.iterators.SerialIterator(values, 4, repeat=False, shuffle=False)
    return create_multi_node_evaluator(cls(iterator, model), COMM)


def test_the_mean_over_ranks_is_returned_and_reported():
    mine = VALUES[RANK::SIZE]
    each = evaluator(mine)
    expected = np.mean([VALUES[rank::SIZE].astype("f8").mean() for rank in range(SIZE)])
    reporter = chainer.Reporter()
    with reporter:
        result = each()
    assert set(result) == {"main/value"}
    np.testing.assert_allclose(result["main/value"], expected, rtol=1e-6)
    assert reporter.observation["main/value"] == result["main/value"]
    assert len(set(COMM.allgather_obj(float(result["main/value"])))) == 1


def test_an_evaluator_keeps_its_class_its_name_and_its_own_evaluate():
    class Doubled(extensions.Evaluator):
        default_name = "doubled"

        def evaluate(self):
            return {"main/value": 2 * super().evaluate()["main/value"]}

    plain, doubled = evaluator(VALUES[:8]), evaluator(VALUES[:8], Doubled)
    assert isinstance(doubled, Doubled)
    assert doubled.default_name == "doubled"
    with chainer.Reporter():
        np.testing.assert_allclose(doubled()["main/value"], 2 * plain()["main/value"])


def test_the_evaluator_that_was_passed_is_the_one_that_averages():
    # Scripts may ignore what create_multi_node_evaluator returns.
    each = extensions.Evaluator(chainer.iterators.SerialIterator(VALUES[:4] + RANK, 4, repeat=False), Report())
    assert create_multi_node_evaluator(each, COMM) is each
    with chainer.Reporter():
        results = each()
    np.testing.assert_allclose(results["main/value"], VALUES[:4].mean() + (SIZE - 1) / 2, rtol=1e-6)


def test_a_rank_that_reports_nothing():
    class Own(extensions.Evaluator):
        def evaluate(self):
            return {"main/value": 3.0} if RANK == 0 else {}

    assert evaluator(VALUES, Own).evaluate() == {"main/value": 3.0}


def test_a_rank_without_samples_does_not_count():
    values = VALUES[:4] if RANK == 0 else VALUES[:0]
    expected = VALUES[:4].astype("f8").mean()
    with chainer.Reporter():
        np.testing.assert_allclose(evaluator(values)()["main/value"], expected, rtol=1e-6)
        assert evaluator(VALUES[:0])() == {}


def test_an_error_on_one_rank_raises_on_all():
    class Own(extensions.Evaluator):
        def evaluate(self):
            if RANK == SIZE - 1:
                raise ValueError("no samples")
            return {"main/value": 1.0}

    with pytest.raises(ValueError, match="no samples"):
        evaluator(VALUES, Own).evaluate()


@pytest.mark.parametrize("values", [{"a": 1}, {"a": np.float16(1), "b": np.arange(3.0)}])
def test_own_evaluators_may_return_any_numbers(values):
    class Own(extensions.Evaluator):
        def evaluate(self):
            return {name: value + RANK for name, value in values.items()}

    results = evaluator(VALUES, Own).evaluate()
    for name, value in values.items():
        np.testing.assert_allclose(results[name], value + (SIZE - 1) / 2)


def test_in_a_trainer(tmp_path):
    model = chainer.links.Classifier(chainer.links.Linear(2, 3))
    random = np.random.RandomState(RANK)
    dataset = chainer.datasets.TupleDataset(random.rand(8, 2).astype("f4"), random.randint(0, 3, 8).astype("i4"))
    iterator = chainer.iterators.SerialIterator(dataset, 4)
    test = chainer.iterators.SerialIterator(dataset, 4, repeat=False, shuffle=False)
    optimizer = chainer.optimizers.SGD(lr=0).setup(model)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    trainer = chainer.training.Trainer(updater, (2, "epoch"), out=tmp_path)
    trainer.extend(create_multi_node_evaluator(extensions.Evaluator(test, model), COMM))
    log = extensions.LogReport(filename=None)
    trainer.extend(log)
    trainer.run()
    losses = COMM.allgather_obj([entry["validation/main/loss"] for entry in log.log])
    assert all(loss == losses[0] for loss in losses)
