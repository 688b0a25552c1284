"""Processes that wait from the start, and take the places of ranks that die, at every point where one may die."""

import pytest
from processes import IS_ALIVE

START = """
import os, signal, sys, time
import numpy as np
import mn_comm
from mn_comm import RankLost, create_communicator
from mn_elastic.spares import Pool
from mn_comm.ranks.watch import Activity

comm = create_communicator("two_dimensional", elastic=True)
me, size = comm.rank, comm.size
changes = []
comm.on_change(changes.append)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def die_at_wait(number):
    "Die before the next wait of that number."
    wait_for = Activity.wait_for
    left = [number]
    def waits(*args):
        left[0] -= 1
        if left[0] < 0:
            die()
        return wait_for(*args)
    Activity.wait_for = waits

def die_when_called(number):
    "Die before a wait since this spare was woken."
    wait = Pool.wait
    def waits(self):
        wait(self)
        die_at_wait(number)
    Pool.wait = waits

def say(*words):
    print(" ".join(map(str, words)) + "\\n", end="", flush=True)

def count(begin=0, end=8):
    "Add up over all ranks in steps, between which spares may join and get the sum."
    total = np.zeros(1)
    if has_waited:
        begin, total = mn_comm.transact(comm, lambda: comm.bcast_obj(None))
    for step in range(begin, end):
        kill(step)
        total = total + mn_comm.transact(comm, lambda: comm.allreduce(np.ones(1))) / comm.size
        if comm.lacks_ranks:
            comm.fill_places()
            mn_comm.transact(comm, lambda: comm.bcast_obj((step + 1, total)))
    say("end", comm.size, int(total[0]), comm.generation)
"""


def ends(printed):
    return [line for line in printed if line.startswith("end")]


SET_ASIDE = """
has_waited = comm.take_places()
(change,) = changes
assert not has_waited and (comm.rank, comm.size, comm.places) == (me, 2, 2)
assert (change.lost, change.set_aside, change.survivors) == ((), (2, 3), (0, 1))
assert (change.size, change.old_size, change.old_rank, change.newcomers) == (2, 4, me, ())
assert comm.has_spares and not comm.lacks_ranks and not comm.take_places()
comm.fill_places()
say("end", comm.allreduce_obj([me]), comm.generation)
"""


def test_some_are_set_aside_and_end_with_the_job(spare_job):
    assert spare_job(2, 4, START + SET_ASIDE) == ["end [0, 1] 1"] * 2
    assert "ranks 2, 3 of 4 set aside as spares, 2 continue (" in spare_job.stderr


JOIN = """
has_waited = comm.take_places()
def kill(step):
    if me == int(sys.argv[1]) and step == 3:
        die()
count()
change = changes[-1]
if has_waited:
    assert (len(changes), change.survivors, change.old_rank) == (1, tuple({0, 1, 2} - {int(sys.argv[1])}) + (3,), 3)
    assert (change.lost, change.set_aside, change.old_size) == ((int(sys.argv[1]),), (), 4)
else:
    assert change.survivors == (0, 1) and len(change.newcomers) == 1
    assert (change.lost, change.size, change.old_size, change.old_rank) == ((), 3, 2, comm.rank)
say(me, comm.rank, has_waited)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_one_joins_and_is_the_last_rank(spare_job, victim):
    printed = spare_job(1, 4, START + JOIN, str(victim))
    assert ends(printed) == ["end 3 8 3"] * 3
    assert printed[:3] == [f"{1 - victim} 0 False", "2 1 False", "3 2 True"]
    assert "process 3 (" in spare_job.stderr
    assert ") joined 2 ranks, 3 continue (" in spare_job.stderr


AT_WAIT = """
if me == 3 and sys.argv[1] == "spare":
    die_when_called(int(sys.argv[2]))
has_waited = comm.take_places()
def kill(step):
    if me == 1 and step == 3:
        die()
if me == 2 and sys.argv[1] == "trainer":
    fill_places = comm.fill_places
    def die_in_it():
        die_at_wait(int(sys.argv[2]))
        fill_places()
    comm.fill_places = die_in_it
count()
"""


@pytest.mark.parametrize("wait", range(0, 11, 2))
def test_the_one_that_is_called_dies_while_it_joins(spare_job, wait):
    # The second spare is called instead.
    printed = spare_job(2, 5, START + AT_WAIT, "spare", str(wait))
    assert [line.rsplit(" ", 1)[0] for line in ends(printed)] == ["end 3 8"] * 3


@pytest.mark.parametrize("wait", range(1, 13, 2))
def test_another_one_dies_while_one_joins(spare_job, wait):
    printed = spare_job(2, 5, START + AT_WAIT, "trainer", str(wait))
    assert [line.rsplit(" ", 1)[0] for line in ends(printed)] == ["end 3 8"] * 3


SEVERAL = """
has_waited = comm.take_places()
def kill(step):
    if step == {0: 2, 2: 2, 1: 5, 4: 6}.get(me):
        die()
count()
"""


def test_more_losses_than_spares(spare_job):
    # Two ranks are lost and two spares join. Then two more ranks are lost, one of which was a spare.
    assert spare_job(2, 5, START + SEVERAL) == ["end 1 8 5"]


WHILE_WAITING = f"""
{IS_ALIVE}
from mn_elastic import spares
spare = comm.allgather_obj(os.getpid())[3]

if me == 3:
    def end_it(pool):
        if os.path.exists("trains"):
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    spares._LOOKS_UNTIL_COUNT = 1
    Pool._count = end_it
has_waited = comm.take_places()
def kill(step):
    if me == 0 and step == 3:
        open("trains", "w").close()
    if me == 0 and step == 6:
        while is_alive(spare):  # it would join
            time.sleep(0.01)
        die()
count()
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_a_spare_dies_while_it_waits(spare_job, how):
    assert spare_job(1, 4, START + WHILE_WAITING, how) in (["end 2 8 2"] * 2, ["end 2 8 3"] * 2)


ALL_GONE = """
has_waited = comm.take_places()
die()
"""


def test_spares_do_not_wait_for_the_dead(spare_job):
    spare_job(2, 4, START + ALL_GONE, status=1)
    assert "all ranks that trained are gone, the spare that waits as process" in spare_job.stderr


ALL_RAISE = """
has_waited = comm.take_places()
raise ValueError("a mistake in the script")
"""


def test_spares_end_with_a_job_that_fails(spare_job):
    spare_job(1, 3, START + ALL_RAISE, status=1)
    assert "no rank continues: the job ends" in spare_job.stderr


IN_THE_SETUP = """
if me == 1:
    die()
mn_comm.transact(comm, lambda: comm.barrier())
has_waited = comm.take_places()
kill = lambda step: None
count()
say(me)
"""


def test_a_rank_that_dies_in_the_setup_costs_a_spare(spare_job):
    assert spare_job(1, 4, START + IN_THE_SETUP) == ["0", "2", "3", *["end 3 8 2"] * 3]


REFUSED = """
import pytest
with pytest.raises(RuntimeError, match=r"CHAINERMN_SPARES=1: expected keeper.maybe_load\\(trainer\\) before the first"):
    comm.transact(lambda: None, is_step=True)
with pytest.raises(ValueError, match="expected one elastic communicator in a job, got another one"):
    create_communicator("naive", elastic=True)
create_communicator("naive")
with pytest.raises(RuntimeError, match="between two transactions"):
    comm.transact(comm.take_places)
comm.take_places()
comm.transact(lambda: None, is_step=True)
comm.catch_up("maybe_load")
assert comm.is_catching_up
with pytest.raises(RuntimeError, match="expected all that communicates before maybe_load"):
    comm.barrier()
comm.catch_up("")
comm.barrier()
say("end", comm.size)
"""


def test_what_is_refused(spare_job):
    assert spare_job(1, 3, START + REFUSED) == ["end 2"] * 2


@pytest.mark.parametrize("text", ["2", "-1", "one"])
def test_numbers_that_cannot_be(spare_job, text):
    code = """
from mn_comm import create_communicator
try:
    create_communicator("naive", elastic=True)
except ValueError as error:
    print(error, flush=True)
"""
    message = f"expected 0 to 1 for CHAINERMN_SPARES, in a job of 2 processes; got {text!r}"
    assert spare_job(text, 2, code) == [message] * 2


def test_an_ordinary_communicator_has_no_spares(spare_job):
    code = """
from mn_comm import create_communicator
try:
    create_communicator("naive")
except ValueError as error:
    print(error, flush=True)
"""
    printed = spare_job(1, 2, code)
    assert len(printed) == 2
    assert "elastic=True) with CHAINERMN_SPARES=1, got elastic=False" in printed[0]
