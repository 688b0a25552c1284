"""Trainings whose lost ranks are replaced by processes that wait in ``keeper.maybe_load``."""

import re

import pytest

pytestmark = pytest.mark.rest

TRAINING = """
import os, signal, sys
import chainer
import chainer.links as L
import numpy as np
from chainer.training import extensions
import mn_comm
from mn_comm.ranks.watch import Activity
from mn_data import ElasticIterator, scatter_dataset
from mn_extensions import create_memory_keeper, create_multi_node_evaluator, multi_node_snapshot
from mn_optim import AfterBackward, DuringBackward, MultiNodeOptimizer, OneStepLate

comm = mn_comm.create_communicator("two_dimensional", elastic=True)
me = comm.rank
comm.transact(lambda: comm.bcast_obj("a part of the set-up"))

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def die_before(what, number=0):
    "Die before a wait of that name."
    wait_for = Activity.wait_for
    left = [number]
    def waits(self, call, name, *args):
        left[0] -= name == what
        if left[0] < 0:
            die()
        return wait_for(self, call, name, *args)
    Activity.wait_for = waits

np.random.seed(me)
model = L.Classifier(L.Linear(None, 4))
with model.init_scope():
    model.large = chainer.Parameter(np.random.rand(*shape).astype("f"))
optimizer = MultiNodeOptimizer(chainer.optimizers.Adam(0.25), comm, eval(when)).setup(model)

@comm.on_change
def keep_the_step_per_sample(change):
    optimizer.alpha *= change.size / change.old_size

random = np.random.RandomState(1)
samples = chainer.datasets.TupleDataset(random.rand(90, 10).astype("f"), random.randint(0, 4, 90).astype("i"))
iterator = ElasticIterator(samples, 5, comm, seed=0)
part = scatter_dataset(samples, comm)
evaluator = extensions.Evaluator(chainer.iterators.SerialIterator(part, 10, repeat=False, shuffle=False), model)
evaluator = create_multi_node_evaluator(evaluator, comm)
keeper = create_memory_keeper(comm)

def digest():
    return "%.9g %.9g" % tuple(sum(param.array.astype("d").ravel()[::97]) for param in (model.large, model.predictor.W))
"""

WITH_TRAINER = """
updater = chainer.training.StandardUpdater(iterator, optimizer)
trainer = chainer.training.Trainer(updater, (20, "iteration"), out="out")
trainer.extend(evaluator, trigger=(4, "iteration"))
snapshot = extensions.snapshot(n_retains=1, autoload=True)
trainer.extend(multi_node_snapshot(comm, snapshot, [0]), trigger=(6, "iteration"))
if comm.rank == 0:
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
trainer.extend(keeper, trigger=(5, "iteration"))

@trainer.extend
@chainer.training.make_extension(trigger=(1, "iteration"), priority=-200)
def end_it(trainer):
    kill(updater.iteration)

resumed = keeper.maybe_load(trainer)
trainer.run()
words = ("end", updater.iteration, optimizer.t, optimizer.alpha, iterator.epoch_detail, comm.size, digest())
print(*words, f"- {me} is {comm.rank} since {resumed}", flush=True)
"""

BY_HAND = """
class State:
    iteration = 0
    def serialize(self, serializer):
        self.iteration = int(serializer("iteration", self.iteration))
        optimizer.serialize(serializer["optimizer"])
        model.serialize(serializer["model"])
        iterator.serialize(serializer["iterator"])
state = State()
resumed = keeper.maybe_load(state, optimizer)
while state.iteration < 20:
    optimizer.update(model, *chainer.dataset.concat_examples(next(iterator)))
    state.iteration += 1
    kill(state.iteration)
    keeper.keep(state, state.iteration)
words = ("end", state.iteration, optimizer.t, comm.size, digest())
print(*words, f"- {me} is {comm.rank} since {resumed}", flush=True)
"""


@pytest.fixture
def train(spare_job):
    """Run a training; return the results that its ranks print, and which ranks these are."""

    def run(spares, processes, kill, loop=WITH_TRAINER, when="AfterBackward()", shape=(3,), before="", status=0):
        code = f"when, shape = {when!r}, {shape}\n{TRAINING}\ndef kill(iteration):\n    {kill}\n{before}\n{loop}"
        printed = spare_job(spares, processes, code, status=status)
        run.stderr = spare_job.stderr
        found = [line.split(" - ") for line in printed if line.startswith("end")]
        return {what for what, _ in found}, [who for _, who in found]

    return run


@pytest.mark.parametrize("when", ["AfterBackward()", "DuringBackward()", "OneStepLate()"])
def test_the_newcomer_has_what_the_others_have(train, when):
    ends, ranks = train(1, 4, "if me == 1 and iteration == 7: die()", when=when)
    (end,) = ends
    # The step size is the one for three of the four ranks of the set-up.
    assert re.match(r"end 20 \d+ 0.1875 [\d.]+ 3 ", end)
    # There is a snapshot by then, which either all ranks load or none.
    assert sorted(ranks) == ["0 is 0 since None", "2 is 1 since None", "3 is 2 since 8"]
    assert ") joined 2 ranks, 3 continue (" in train.stderr
    assert re.search(r"rank 2 of 3 got the state of iteration 8: [\d.]+ MB in \d+ ms", train.stderr)


def test_a_training_of_ones_own(train):
    ends, ranks = train(1, 3, "if me == 0 and iteration == 7: die()", loop=BY_HAND)
    assert len(ends) == 1
    assert sorted(ranks) == ["1 is 0 since None", "2 is 1 since 8"]


def test_ranks_are_lost_again_and_again(train):
    ends, ranks = train(2, 4, "if iteration == {0: 3, 2: 8, 3: 12}.get(me): die()")
    assert len(ends) == 1
    assert ranks == ["1 is 0 since None"]


ARM = "if me == 0 and iteration == 7: die()\n    if me == 1 and iteration == 8: die_before(*what)"


@pytest.mark.parametrize("what", [("scatter", 0), ("Send", 1), ("Agree", 6)])
def test_the_one_that_sends_dies_and_another_one_sends(train, what):
    # The state is sent by one `scatter` with the lengths of its arrays, and by a `Send` for each array.
    ends, ranks = train(1, 4, ARM, shape=(50_000, 2), before=f"what = {what}")
    assert len(ends) == 1
    assert len(ranks) == 2


@pytest.mark.parametrize("what", [("scatter", 0), ("Recv", 1)])
def test_the_newcomer_dies_while_it_receives(train, what):
    before = f"if me == 3: die_before(*{what})"
    ends, ranks = train(2, 5, "if me == 0 and iteration == 7: die()", shape=(50_000, 2), before=before)
    assert len(ends) == 1
    assert sorted(ranks) == ["1 is 0 since None", "2 is 1 since None", "4 is 2 since 9"]


GROWS = """
take_places = comm.take_places
def take_and_grow():
    has_waited = take_places()
    if has_waited:
        model.add_param("more", (2, 2))
    return has_waited
comm.take_places = take_and_grow
"""


def test_a_newcomer_whose_model_is_another_dies_alone(train):
    _, ranks = train(1, 3, "if me == 0 and iteration == 7: die()", loop=BY_HAND, before=GROWS)
    assert ranks == ["1 is 0 since None"]
    assert "the checkpoint is of a different model: it has no model/more" in train.stderr


def test_an_exception_in_the_setup_of_one_rank(train):
    ends, ranks = train(1, 3, "pass", before="if me == 2: raise ValueError('a mistake')")
    assert len(ends) == 1
    assert sorted(ranks) == ["0 is 0 since None", "1 is 1 since None"]


def test_what_the_others_did_long_ago_is_refused(train):
    loop = WITH_TRAINER.replace("trainer.run()", "comm.barrier()\ntrainer.run()")
    _, ranks = train(1, 3, "if me == 0 and iteration == 7: die()", loop=loop)
    assert ranks == ["1 is 0 since None"]
    assert "RuntimeError: expected all that communicates before maybe_load" in train.stderr


def test_a_script_without_a_place_for_spares_is_refused(train):
    loop = WITH_TRAINER.replace("keeper.maybe_load(trainer)", "None")
    train(1, 3, "pass", loop=loop, status=1)
    assert "expected keeper.maybe_load(trainer) before the first step" in train.stderr


def test_nobody_is_left_who_has_the_state(train):
    before = "if me == 0: die_before('scatter')"
    train(1, 3, "if me == 1 and iteration == 7: die()", before=before, status=1)
    assert "the state of the training is lost" in train.stderr


SHIFT = """
import types
maybe_load = keeper.maybe_load
def with_shift(target, *args):
    target.extend(extensions.ExponentialShift("alpha", 0.5), trigger=(3, "iteration"))
    model.predictor.W.update_rule.enabled = False
    target.extend(unfreeze, trigger=(4, "iteration"))
    return maybe_load(target, *args)
def unfreeze(trainer):
    model.predictor.W.update_rule.enabled = True
    model.large.update_rule.hyperparam.alpha = 0.125
keeper.maybe_load = with_shift
"""


def test_a_newcomer_has_what_extensions_have_changed_in_the_optimizer(train):
    ends, ranks = train(1, 4, "if me == 1 and iteration == 7: die()", before=SHIFT)
    (end,) = ends
    assert sorted(ranks) == ["0 is 0 since None", "2 is 1 since None", "3 is 2 since 8"]
    # Three of four ranks train, and the extension has fired six times.
    assert float(end.split()[3]) == 0.75 * 0.25 * 0.5**6


CHANGED_BY_HAND = """
keep = keeper.keep
def change_and_keep(target, iteration):
    if iteration == 3:
        optimizer.alpha = 0.03125
        model.predictor.W.update_rule.enabled = False
    keep(target, iteration)
keeper.keep = change_and_keep
"""


def test_a_newcomer_in_a_loop_of_ones_own_has_it_as_well(train):
    ends, ranks = train(1, 3, "if me == 0 and iteration == 7: die()", loop=BY_HAND, before=CHANGED_BY_HAND)
    assert len(ends) == 1
    assert sorted(ranks) == ["1 is 0 since None", "2 is 1 since 8"]


EARLY_STOPPING = """
from mn_extensions import MultiNodeEarlyStoppingTrigger
class Worse(chainer.training.Extension):
    trigger, priority = (1, "iteration"), 300
    def __call__(self, trainer):
        chainer.report({"value": float(trainer.updater.iteration)})
stop = MultiNodeEarlyStoppingTrigger(comm, check_trigger=(2, "iteration"), monitor="value", patience=6)
Trainer = chainer.training.Trainer
def stopping(updater, _, **options):
    trainer = Trainer(updater, stop, **options)
    trainer.extend(Worse())
    return trainer
chainer.training.Trainer = stopping
"""


def test_a_newcomer_stops_when_the_others_stop(train):
    ends, ranks = train(1, 4, "if me == 1 and iteration == 7: die()", before=EARLY_STOPPING)
    (end,) = ends
    assert end.startswith("end 14 ")
    assert sorted(ranks) == ["0 is 0 since None", "2 is 1 since None", "3 is 2 since 8"]


LOG_ON_THE_LAST_RANK = """
LogReport, extend = extensions.LogReport, chainer.training.Trainer.extend
def extend_on_last(self, extension, **options):
    if not isinstance(extension, LogReport):
        extend(self, extension, **options)
chainer.training.Trainer.extend = extend_on_last
maybe_load = keeper.maybe_load
def with_log(target):
    if me == comm.size - 1:
        extend(target, LogReport(trigger=(1, "iteration")))
    return maybe_load(target)
keeper.maybe_load = with_log
"""


def test_a_newcomer_has_an_extension_that_the_others_do_not_have(train):
    ends, ranks = train(1, 3, "if me == 0 and iteration == 7: die()", before=LOG_ON_THE_LAST_RANK)
    assert len(ends) == 1
    assert sorted(ranks) == ["1 is 0 since None", "2 is 1 since 8"]
    assert "the state in memory has nothing of LogReport, which starts again" in train.stderr


def test_a_spare_that_is_not_needed_communicates_at_its_end(train):
    loop = f"try:\n    {WITH_TRAINER.strip().replace(chr(10), chr(10) + '    ')}\nfinally:\n    comm.barrier()"
    ends, ranks = train(1, 3, "pass", loop=loop)
    assert len(ends) == 1
    assert sorted(ranks) == ["0 is 0 since None", "1 is 1 since None"]


def test_a_spare_does_not_join_another_training_of_the_script(train):
    # The spare waits in the first training; the others are in the second by now.
    before = "keeper = [keeper, create_memory_keeper(comm)][me < 2]"
    _, ranks = train(1, 3, "if me == 0 and iteration == 7: die()", before=before)
    assert ranks == ["1 is 0 since None"]
    assert "expected the state of training 1 of this script, got that of training 2" in train.stderr
