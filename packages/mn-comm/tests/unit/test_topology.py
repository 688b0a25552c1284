import pytest
from hypothesis import given
from hypothesis import strategies as st

from mn_comm.ranks.topology import Topology, place


def test_two_nodes_of_different_size():
    hosts = ["a", "b", "a"]
    same = {"size": 3, "inter_size": 2, "least_intra_size": 1, "most_intra_size": 2}
    assert place(hosts, 0) == Topology(rank=0, intra_rank=0, intra_size=2, inter_rank=0, **same)
    assert place(hosts, 1) == Topology(rank=1, intra_rank=0, intra_size=1, inter_rank=1, **same)
    assert place(hosts, 2) == Topology(rank=2, intra_rank=1, intra_size=2, inter_rank=0, **same)


@pytest.mark.parametrize("hosts", [["b", "a"], ["z", "y", "x"]])
def test_nodes_are_numbered_by_their_lowest_rank_not_by_name(hosts):
    assert [place(hosts, rank).inter_rank for rank in range(len(hosts))] == list(range(len(hosts)))


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_intra_and_inter_rank_identify_every_rank(hosts):
    places = [place(hosts, rank) for rank in range(len(hosts))]
    assert len({(p.inter_rank, p.intra_rank) for p in places}) == len(hosts)
    for rank, p in enumerate(places):
        assert p.rank == rank
        assert 0 <= p.intra_rank < p.intra_size
        assert p.intra_size == hosts.count(hosts[rank])
        assert 0 <= p.inter_rank < p.inter_size == len(set(hosts))
