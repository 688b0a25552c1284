"""Where each rank runs: the numbers every strategy and every script relies on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from mpi4py import MPI

__all__ = ["Topology", "discover", "place", "split"]


@dataclass(frozen=True)
class Topology:
    """The place of one rank among the ranks of its communicator.

    Attributes:
        rank: This process among all processes, from 0.
        size: How many processes there are.
        intra_rank: This process among those of the same host, from 0.
        intra_size: How many processes run on this host.
        inter_rank: This host among all hosts, numbered in the order of their lowest ranks.
        inter_size: How many hosts there are.
    """

    rank: int
    size: int
    intra_rank: int
    intra_size: int
    inter_rank: int
    inter_size: int


def discover(mpi_comm: MPI.Intracomm) -> Topology:
    """Find out where each rank runs, by host name; collective: every rank must call.

    Args:
        mpi_comm: The communicator whose ranks are placed.

    Returns:
        The topology as seen from the calling rank.
    """
    return place(mpi_comm.allgather(MPI.Get_processor_name()), mpi_comm.rank)


def place(hosts: Sequence[str], rank: int) -> Topology:
    """Place ``rank`` given the host name of every rank.

    Args:
        hosts: The host name of each rank, by rank; hosts may hold different numbers of ranks, in any order.
        rank: The rank to place.

    Returns:
        Its topology.
    """
    nodes = list(dict.fromkeys(hosts))  # in the order of first appearance
    neighbours = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    return Topology(
        rank=rank,
        size=len(hosts),
        intra_rank=neighbours.index(rank),
        intra_size=len(neighbours),
        inter_rank=nodes.index(hosts[rank]),
        inter_size=len(nodes),
    )


def split(mpi_comm: MPI.Intracomm, color: int, key: int) -> MPI.Intracomm:
    """Split an MPI communicator into groups of equal color, ordered by key; collective."""
    return cast(MPI.Intracomm, mpi_comm.Split(color, key))  # the stubs promise less than MPI does
