"""The arithmetic of the scaling study in benchmarks/; the study itself is not a test."""

import dataclasses
import importlib
import itertools
import math
import random

import pytest

MEGABYTE = 2**20


@pytest.fixture(scope="module")
def cost(root_of_benchmarks):
    return importlib.import_module("cost")


@pytest.fixture(scope="module")
def scaling(root_of_benchmarks):
    return importlib.import_module("scaling")


@pytest.fixture(scope="module")
def extrapolate(root_of_benchmarks):
    return importlib.import_module("extrapolate")


@pytest.fixture(scope="module")
def root_of_benchmarks(root):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root / "benchmarks"))
        yield


@pytest.fixture
def machine(cost):
    return cost.Machine(cores=2, cache_bytes=32 * MEGABYTE)


TRUE = {
    "call": 2e-5,
    "array": 3e-6,
    "copy": 1e-10,
    "add": 1.2e-10,
    "miss": 0.5e-10,
    "sync": 8e-6,
    "shm": 3e-10,
    "far": 0.6e-10,
    "crowd": 2e-4,
    "turn": 1e-4,
    "hop": 6e-5,
    "wire": 8.4e-9,
    "stall": 8e-9,
}


def make_points(cost, layouts):
    shapes = [(0.25, 4), (1, 1), (1, 16), (4, 64), (16, 1), (64, 16)]
    return [
        cost.Point(name, hosts, int(mb * MEGABYTE), n)
        for hosts in layouts
        for name in ("naive", "flat", "hierarchical", "two_dimensional")
        for mb, n in shapes
    ]


FITTED = [(1,), (2,), (4,), (1, 1), (1, 1, 1), (2, 1)]
OTHERS = [(3,), (2, 2), (1, 1, 1, 1)]


def test_the_fit_finds_the_parameters_that_times_were_made_with(cost, machine):
    points = make_points(cost, FITTED)
    found = cost.fit(points, [cost.predict(point, machine, TRUE) for point in points], machine)
    assert found == pytest.approx(TRUE, rel=1e-4)


def test_noise_of_5_percent_moves_no_prediction_by_10(cost, machine):
    noise = random.Random(0)
    points = make_points(cost, FITTED)
    times = [cost.predict(point, machine, TRUE) * noise.uniform(0.95, 1.05) for point in points]
    found = cost.fit(points, times, machine)
    for point in make_points(cost, OTHERS):
        assert cost.predict(point, machine, found) == pytest.approx(cost.predict(point, machine, TRUE), rel=0.1)


def test_no_parameter_is_negative_even_if_that_would_fit_better(cost, machine):
    points = make_points(cost, [(1,), (2,)])
    found = cost.fit(points, [1e-3 + 1e-2 / (1 + point.nbytes / MEGABYTE) for point in points], machine)
    assert min(found.values()) >= 0
    assert found["wire"] == found["hop"] == 0  # nothing was sent over a link


def test_more_bytes_arrays_and_processes_never_take_less_time(cost, machine):
    for point in make_points(cost, [*FITTED, *OTHERS]):
        seconds = cost.predict(point, machine, TRUE)
        twice = dataclasses.replace(point, nbytes=2 * point.nbytes)
        assert seconds < cost.predict(twice, machine, TRUE)
        if point.strategy != "naive":  # whose messages become shorter
            assert seconds < cost.predict(dataclasses.replace(point, arrays=2 * point.arrays), machine, TRUE)
        if len(point.hosts) > 1:
            again = dataclasses.replace(point, hosts=point.hosts * 2)
            assert seconds < cost.predict(again, machine, TRUE)


@pytest.mark.parametrize(("ranks", "messages", "volume"), [(1, 0, 0), (2, 2, 1), (3, 4, 3), (4, 4, 1.5), (1024, 20, 2)])
def test_an_allreduce_has_the_messages_and_bytes_of_the_paper(cost, ranks, messages, volume):
    sent = list(cost.allreduce_messages(ranks, 1000.0))
    assert len(sent) == messages
    assert sum(sent) == pytest.approx(1000 * volume, rel=2e-3)


def test_one_process_sends_nothing(cost, machine):
    for point in make_points(cost, [(1,)]):
        values = cost.features(point, machine)
        assert not any(values[name] for name in ("sync", "shm", "far", "turn", "hop", "wire", "stall"))


@pytest.mark.parametrize(
    ("strategy", "hosts", "each"),
    [
        ("naive", (2,), 0.5),
        ("flat", (2,), 4),
        ("two_dimensional", (1,), 4),
        ("two_dimensional", (2,), 0.5),
        ("two_dimensional", (4,), 16),
        ("two_dimensional", (1, 1), 4),
        ("hierarchical", (2, 1), 16),
    ],
)
def test_buckets_are_as_large_as_mn_comm_makes_them(cost, machine, strategy, hosts, each):
    point = cost.Point(strategy, hosts, 96 * MEGABYTE, 192)
    assert point.nbytes / cost.buckets(point, machine) == each * MEGABYTE


@pytest.mark.parametrize(
    ("strategy", "hosts", "copied", "added", "meetings"),
    [
        ("flat", (1,), 4, 0, 0),
        ("flat", (2, 2), 6, 0, 4),
        ("two_dimensional", (1,), 4, 0, 0),
        ("two_dimensional", (2,), 2, 2, 6),
        ("two_dimensional", (4,), 3, 1.5, 6),
        ("two_dimensional", (1, 1), 6, 0, 0),
        ("two_dimensional", (2, 2), 4, 1.5, 4),
        ("hierarchical", (2, 2), 5, 1.5, 5),
    ],
)
def test_what_becomes_of_each_byte_of_a_bucket(cost, strategy, hosts, copied, added, meetings):
    machine = cost.Machine(cores=4, cache_bytes=32 * MEGABYTE)
    values = cost.features(cost.Point(strategy, hosts, MEGABYTE, 1), machine)
    assert (values["copy"], values["add"]) == (copied * MEGABYTE, added * MEGABYTE)
    assert values["sync"] == meetings


def test_efficiency_is_one_alone_and_falls_towards_a_limit(extrapolate):
    for cluster in extrapolate.CLUSTERS:
        for network in cluster.networks:
            for overlap in (True, False):
                line = [extrapolate.efficiency(n, cluster, network, 0.9, overlap=overlap) for n in extrapolate.WORKERS]
                assert line[0] == 1
                assert all(a >= b > 0 for a, b in itertools.pairwise(line))
                assert line[-2] - line[-1] < 0.02  # a link carries twice the bytes at most, however many nodes


def test_overlap_helps_and_never_hurts(extrapolate):
    for cluster in extrapolate.CLUSTERS:
        for network in cluster.networks:
            for n in extrapolate.WORKERS[1:]:
                with_it, without = (
                    extrapolate.efficiency(n, cluster, network, 0.9, overlap=overlap) for overlap in (True, False)
                )
                assert with_it > without


def test_an_infinite_network_costs_nothing(extrapolate):
    cluster = dataclasses.replace(extrapolate.CLUSTERS[0], rate=math.inf)
    network = extrapolate.Network("none", rate=math.inf, latency=0)
    assert extrapolate.efficiency(1024, cluster, network, 1, overlap=False) == 1


def test_the_modelled_cluster_of_the_paper_is_near_the_published_efficiency(extrapolate):
    cluster = extrapolate.CLUSTERS[0]
    (fdr,) = [network for network in cluster.networks if "FDR" in network.name]
    modelled = extrapolate.efficiency(128, cluster, fdr, 0.9, overlap=False)
    assert modelled == pytest.approx(0.9, abs=0.05)


def test_points_that_were_measured_before_are_read(cost, scaling):
    line = {"strategy": "flat", "hosts": [2, 1], "nbytes": 8, "arrays": 2}
    expected = cost.Point("flat", (2, 1), 8, 2)
    assert scaling.as_point(line) == scaling.as_point({**line, "streamed_bytes": 4}) == expected


def test_the_cache_is_as_large_as_fits_the_times(cost, machine):
    points = make_points(cost, [(1,), (2,), (4,), (1, 1)])
    smaller = dataclasses.replace(machine, cache_bytes=8 * MEGABYTE)
    times = [cost.predict(point, smaller, TRUE) for point in points]
    assert cost.with_usable_cache(points, times, machine) == smaller
