"""Descriptions of networks for SimGrid."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NETWORKS", "Network", "fat_tree", "star"]

LEAF = 32  # nodes of a switch
SPEED = "1Gf"  # of a host; the replay does not compute
HEAD = '<?xml version="1.0"?>\n<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">\n<platform version="4.1">\n'


@dataclass(frozen=True)
class Network:
    """A network between nodes.

    Attributes:
        name: Its name.
        rate: Bytes per second of a node's link, in each direction.
        latency: Seconds of a message between nodes of different switches.
    """

    name: str
    rate: float
    latency: float


NETWORKS = (
    Network("1 Gbit/s", 0.125e9, 50e-6),
    Network("10 Gbit/s", 1.25e9, 30e-6),
    Network("100 Gbit/s", 12.5e9, 2e-6),
)


def fat_tree(nodes: int, network: Network, use: float, taper: int = 1) -> str:
    """Return a fat tree of two levels, with links that carry data in both directions independently.

    Args:
        nodes: The number of nodes: node-0, node-1 and so on.
        network: The links; all of them are equal.
        use: The part of their rate that messages use.
        taper: How many nodes share a link between the levels.
    """
    leaves = max(2, -(-nodes // LEAF))
    up = LEAF // taper
    # A message to another switch passes four links.
    return (
        f'{HEAD}<cluster id="tree" prefix="node-" suffix="" radical="0-{leaves * LEAF - 1}" speed="{SPEED}" '
        f'bw="{network.rate * use:.9g}Bps" lat="{network.latency / 4:.9g}s" sharing_policy="SPLITDUPLEX" '
        f'topology="FAT_TREE" topo_parameters="2;{LEAF},{leaves};1,{up};1,1"/>\n</platform>\n'
    )


def star(nodes: int, network: Network, use: float) -> str:
    """Return the network of tools/cluster.py: it limits what each host sends, and not what it receives."""
    lines = [
        f'<link id="out-{i}" bandwidth="{network.rate * use:.9g}Bps" latency="{network.latency:.9g}s"/>'
        for i in range(nodes)
    ]
    hosts = [f'<host id="node-{i}" speed="{SPEED}"/>' for i in range(nodes)]
    routes = [
        f'<route src="node-{i}" dst="node-{j}" symmetrical="NO"><link_ctn id="out-{i}"/></route>'
        for i in range(nodes)
        for j in range(nodes)
        if i != j
    ]
    loops = [f'<link id="loop-{i}" bandwidth="1e15Bps" latency="0s" sharing_policy="FATPIPE"/>' for i in range(nodes)]
    loops += [f'<route src="node-{i}" dst="node-{i}"><link_ctn id="loop-{i}"/></route>' for i in range(nodes)]
    zone = "\n".join(['<zone id="star" routing="Full">', *hosts, *lines, *loops, *routes, "</zone>"])
    return f"{HEAD}{zone}\n</platform>\n"
