"""The environment of a measurement: the nodes, the MPI library, and how a node's processes exchange gradients."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from mpi4py import MPI

from mn_comm.ranks.context import contexts_of
from mn_comm.ranks.shared_memory import share

_PROBE_BYTES = 4096


@dataclass(frozen=True)
class Node:
    """One host.

    Attributes:
        host: Its name.
        ranks: How many ranks run on it.
        cores: How many cores they may use in total.
    """

    host: str
    ranks: int
    cores: int


@dataclass(frozen=True)
class Machines:
    """The environment of a measurement; the same on every rank.

    Attributes:
        nodes: The hosts, in the order of their lowest ranks.
        mpi: The MPI library and its version.
        standard: The version of the MPI standard.
        within_nodes: How host arrays are exchanged within a node: ``shared memory``, ``messages: REASON``, or ``one
            rank per node``.
    """

    nodes: tuple[Node, ...]
    mpi: str
    standard: str
    within_nodes: str

    @property
    def ranks(self) -> int:
        """How many there are."""
        return sum(node.ranks for node in self.nodes)

    def warnings(self) -> list[str]:
        """Return a line for each host whose ranks outnumber their cores."""
        return [
            f"{node.ranks} ranks share {node.cores} core{'s' * (node.cores > 1)} on {node.host}: they wait for each "
            "other's turn, and the figures say little about the network"
            for node in self.nodes
            if node.ranks > node.cores
        ]

    def figures(self) -> dict[str, Any]:
        """Return all of it as an object for ``json``."""
        return {"ranks": self.ranks, **asdict(self), "warnings": self.warnings()}


def look(mpi_comm: MPI.Intracomm) -> Machines:
    """Determine the environment; collective."""
    # A process that is bound to one core cannot use others.
    places = mpi_comm.allgather((MPI.Get_processor_name(), frozenset(os.sched_getaffinity(0))))
    hosts = list(dict.fromkeys(host for host, _ in places))
    nodes = []
    for host in hosts:
        cores = [cores for other, cores in places if other == host]
        nodes.append(Node(host, len(cores), len(frozenset[int]().union(*cores))))
    return Machines(
        nodes=tuple(nodes),
        mpi=_library(MPI.Get_library_version()),
        standard="{}.{}".format(*MPI.Get_version()),
        within_nodes=_within_nodes(mpi_comm),
    )


def _library(version: str) -> str:
    """Return the name and version from MPI's description of itself, which may also say how it was built."""
    return " ".join(version.rstrip("\0").splitlines()[0].split(",")[0].split())


def _within_nodes(mpi_comm: MPI.Intracomm) -> str:
    context = contexts_of(mpi_comm).foreground
    try:
        share(context.within, _PROBE_BYTES)
        mine = "shared memory" if context.topology.intra_size > 1 else ""
    except OSError as error:
        mine = f"messages: {error}"
    found = [each for each in mpi_comm.allgather(mine) if each]
    # If nodes differ, report the one that cannot share memory.
    return max(found, key=lambda each: each.startswith("messages"), default="one rank per node")
