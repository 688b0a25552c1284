"""Where each rank runs: the numbers on which strategies and scripts rely."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from mn_comm.basis.mpi import MPI


class Topology(NamedTuple):
    """The place of one rank among the ranks of its communicator.

    Attributes:
        rank: This process among all processes, from 0.
        size: How many processes there are.
        intra_rank: This process among those of the same host, from 0.
        intra_size: How many processes run on this host.
        inter_rank: This host among all hosts, numbered in the order of their lowest ranks.
        inter_size: How many hosts there are.
        least_intra_size: The smallest number of processes on a host.
        most_intra_size: The largest number of processes on a host.
    """

    rank: int
    size: int
    intra_rank: int
    intra_size: int
    inter_rank: int
    inter_size: int
    least_intra_size: int
    most_intra_size: int


def discover(ranks: MPI.Intracomm) -> Topology:
    """Return the place of this rank among others, by the names of their hosts; collective."""
    return place(ranks.allgather(MPI.Get_processor_name()), ranks.rank)


def place(hosts: Sequence[str], rank: int) -> Topology:
    """Return the place of a rank, given the host of every rank, with any number of ranks on each, in any order."""
    nodes = list(dict.fromkeys(hosts))  # in the order of first appearance
    neighbours = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    return Topology(
        rank=rank,
        size=len(hosts),
        intra_rank=neighbours.index(rank),
        intra_size=len(neighbours),
        inter_rank=nodes.index(hosts[rank]),
        inter_size=len(nodes),
        least_intra_size=min(Counter(hosts).values()),
        most_intra_size=max(Counter(hosts).values()),
    )
