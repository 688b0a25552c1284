"""The generator and the recorder of the simulation in benchmarks/; nothing here needs SimGrid."""

import importlib
import xml.etree.ElementTree as ElementTree
from collections import Counter

import numpy as np
import pytest

MEGABYTE = 2**20
HOSTS = (8, 8, 4)


@pytest.fixture(scope="module")
def load(root):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root / "benchmarks"))
        yield lambda name: importlib.import_module(f"simulation.{name}")


@pytest.fixture(scope="module")
def messages(load):
    return load("messages")


@pytest.fixture(scope="module")
def plan(load):
    return load("plan")


@pytest.fixture
def fit(plan, load):
    cost = importlib.import_module("cost")
    parameters = dict.fromkeys(cost.PARAMETERS, 0.0) | {"add": 1e-9, "copy": 1e-9}
    return plan.Fit(parameters, cost.Machine(cores=64, cache_bytes=2**40), use=1.0)


def calls_of_all(messages, strategy, lengths, hosts=HOSTS, compression=""):
    return [list(messages.calls(strategy, hosts, rank, lengths, compression)) for rank in range(sum(hosts))]


@pytest.mark.parametrize("strategy", ["naive", "flat", "hierarchical", "two_dimensional"])
@pytest.mark.parametrize("hosts", [HOSTS, (1, 1, 1), (2, 1)])
def test_the_ranks_of_a_collective_all_call_it_in_the_same_order(messages, strategy, hosts):
    found = calls_of_all(messages, strategy, [5 * MEGABYTE, 1001], hosts)
    groups = {call.ranks for each in found for call in each}
    for group in groups:
        of_group = [[call for call in found[rank] if call.ranks == group] for rank in group]
        assert all(each == of_group[0] for each in of_group)
        assert all(rank in group or group not in {c.ranks for c in found[rank]} for rank in range(sum(hosts)))


@pytest.mark.parametrize(
    ("strategy", "hosts", "most"),
    [
        ("flat", HOSTS, 4),
        ("hierarchical", HOSTS, 16),
        ("hierarchical", (1, 1), 4),  # nobody to share memory with
        ("two_dimensional", HOSTS, 4),  # a quarter of 16: the smallest node has four ranks
    ],
)
def test_the_leaders_of_a_node_exchange_every_byte_once(messages, strategy, hosts, most):
    lengths = [5 * MEGABYTE, 1001, 7]
    found = calls_of_all(messages, strategy, lengths, hosts)
    leaders = max(1, messages.leaders_of(strategy, hosts))
    sent = [sum(call.nbytes for call in each if call.kind == "Allreduce") for each in found]
    assert sum(sent[:leaders]) == 4 * sum(lengths)
    assert max(call.nbytes for each in found for call in each) <= most * MEGABYTE


def test_naive_sends_each_gradient_by_itself(messages):
    sent = [call.nbytes for call in messages.calls("naive", HOSTS, 3, [7, 1, 5]) if call.kind == "Allreduce"]
    assert sent == [28, 4, 20]


def test_ranks_whose_share_is_added_up_by_others_meet_once_more(messages):
    def meetings(strategy, hosts):
        return sum(call.kind == "Barrier" for call in messages.calls(strategy, hosts, 0, [100]))

    assert meetings("two_dimensional", (8, 8)) == 2
    assert meetings("two_dimensional", (8, 4)) == meetings("hierarchical", (8, 8)) == 3


@pytest.mark.parametrize("length", [1, 255, 70_000, 1_000_001])
def test_the_messages_of_int8_reach_every_rank_and_hold_every_element_twice(messages, length):
    found = calls_of_all(messages, "flat", [length], (1, 1, 1, 1), "Int8")
    received = Counter()
    for each in found:
        for call in each[1:]:
            received[call.ranks[0]] += call.nbytes
    # Each range goes from three ranks to its owner, and from there to three ranks: a byte for each element.
    elements = 6 * length
    assert elements < sum(received.values()) <= elements * (1 + 4 / 256) + 6 * 4 * 4
    assert all(call.ranks != (rank,) for rank, each in enumerate(found) for call in each)


def test_another_compression_is_refused(messages):
    with pytest.raises(ValueError, match="expected compression Int8 or none, got TopK"):
        list(messages.calls("flat", HOSTS, 0, [1], "TopK"))


def test_neighbours_are_on_the_node_and_at_the_same_place(messages):
    assert messages.neighbours((2, 3, 1), 3) == ((2, 3, 4), (1, 3))
    assert messages.neighbours((2, 3, 1), 5) == ((5,), (0, 2, 5))


def test_the_recorder_sees_the_calls_of_one_rank_and_then_stops(load):
    MPI = importlib.import_module("mpi4py.MPI")
    building_blocks = importlib.import_module("mn_comm.building_blocks")
    messages = load("messages")
    ranks = building_blocks.Ranks(MPI.COMM_SELF)
    me, array = MPI.COMM_WORLD.rank, np.ones(5, np.float32)
    before = dict(vars(building_blocks.Ranks))
    with load("recorder").record() as found:
        ranks.Allreduce(MPI.IN_PLACE, array)
        ranks.Iallreduce(MPI.IN_PLACE, array).Wait()
        ranks.Barrier()
        request = ranks.Irecv(np.empty(3, np.float32), 0, 0)
        ranks.Isend(array[:3], 0, 0).Wait()
        request.Wait()
    ranks.Barrier()
    kinds = [("Allreduce", 20), ("Iallreduce", 20), ("Barrier", 0), ("Isend", 12)]
    assert found == [messages.Call(kind, (me,), nbytes) for kind, nbytes in kinds]
    assert dict(vars(building_blocks.Ranks)) == before


def test_the_bytes_between_nodes_are_those_of_the_messages(plan):
    cost = importlib.import_module("cost")
    case = plan.Case("two_dimensional", (8,) * 16, (3_000_001,))
    each = sum(cost.exchanges(16, 4 * 3_000_001))
    assert plan.bytes_between(case) == pytest.approx(16 * each)
    # Of three nodes, one gives all to another, those two exchange halves, and the result goes back.
    assert plan.bytes_between(plan.Case("flat", (8,) * 3, (1000,))) == 4 * 1000 * (1 + 1 + 1 + 1)


@pytest.mark.parametrize("strategy", ["naive", "flat", "hierarchical", "two_dimensional"])
def test_a_rank_that_stands_for_its_node_sends_as_many_bytes_as_its_leaders(plan, fit, strategy):
    case = plan.Case(strategy, (8,) * 4, (5 * MEGABYTE, 1001))

    def sent(alone):
        words = [line.split() for line in plan.steps(case, fit, alone=alone)]
        return sum(int(each[1]) * int(each[2]) for each in words if each[0] == "allreduce")

    assert sent(True) == pytest.approx(sent(False), rel=1e-5)
    assert sent(True) == pytest.approx(4 * sum(case.lengths), rel=1e-5)


def test_the_delays_of_a_plan_are_the_time_in_nodes_and_of_adding_up(plan, fit):
    case = plan.Case("hierarchical", (8,) * 4, (5 * MEGABYTE, 1001))
    delays = [float(line.split()[1]) for line in plan.steps(case, fit) if line.startswith("delay")]
    adding = 3 * 1e-9 * 3 / 4 * 4 * sum(case.lengths)
    assert sum(delays) == pytest.approx(plan.within(case, fit) + adding)
    assert not any(float(line.split()[1]) for line in plan.steps(case, None) if line.startswith("delay"))


@pytest.mark.parametrize(("nodes", "hosts"), [(1, 64), (64, 64), (125, 128), (1250, 1280)])
def test_a_fat_tree_has_enough_nodes(load, nodes, hosts):
    networks = load("networks")
    (cluster,) = ElementTree.fromstring(networks.fat_tree(nodes, networks.NETWORKS[0], 1, taper=4))
    levels, down, up, _ = cluster.get("topo_parameters").split(";")
    assert (levels, up) == ("2", "1,8")
    assert int(np.prod([int(n) for n in down.split(",")])) == hosts
    assert cluster.get("radical") == f"0-{hosts - 1}"


def test_a_star_limits_what_each_host_sends(load):
    networks = load("networks")
    network = networks.Network("test", rate=1e6, latency=1e-3)
    (zone,) = ElementTree.fromstring(networks.star(3, network, 0.5))
    links = {link.get("id"): link.get("bandwidth") for link in zone.iter("link")}
    assert links["out-1"] == "500000Bps"
    route = {(each.get("src"), each.get("dst")): [link.get("id") for link in each] for each in zone.iter("route")}
    assert route["node-1", "node-2"] == ["out-1"]
    assert len(route) == 9
