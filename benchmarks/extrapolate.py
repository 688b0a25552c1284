"""From the model to other machines: the efficiency of training ResNet-50 on up to 1,024 GPUs.

All of it is modelled, except for one figure: the part of a link's nominal rate that MPI's messages use, which
scaling.py measures. The networks' rates are nominal, their latencies are of the usual order, and the GPUs' speeds are
published.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost import allreduce_messages

__all__ = [
    "CLUSTERS",
    "PUBLISHED",
    "WORKERS",
    "Cluster",
    "Network",
    "Published",
    "averaging",
    "efficiency",
    "slow_network",
]

GRADIENT_BYTES = 102_228_128  # ResNet-50, in float32
WORKERS = tuple(2**i for i in range(11))
BUCKETS = 4  # of about 25 MB
BACKWARD = 2 / 3  # of the computation


@dataclass(frozen=True)
class Network:
    """The network between nodes.

    Args:
        name: Its name.
        rate: Bytes per second of a node's link, in each direction.
        latency: Seconds of a message.
    """

    name: str
    rate: float
    latency: float


GBE1 = Network("1 Gbit/s Ethernet", 0.125e9, 50e-6)
GBE10 = Network("10 Gbit/s Ethernet", 1.25e9, 30e-6)
FDR = Network("56 Gbit/s InfiniBand FDR", 6.8e9, 2e-6)  # 64 of 66 bits are data
EDR = Network("100 Gbit/s InfiniBand EDR", 12.1e9, 2e-6)
NDR = Network("400 Gbit/s InfiniBand NDR", 50e9, 2e-6)


@dataclass(frozen=True)
class Cluster:
    """Nodes of one kind.

    Args:
        name: The GPUs of a node.
        gpus: The number of GPUs of a node.
        rate: Bytes per second of each GPU's link to the other GPUs of its node, in each direction.
        compute: The seconds of computation of a GPU for one mini-batch.
        networks: The possible networks between the nodes.
        source: The source of these seconds.
    """

    name: str
    gpus: int
    rate: float
    compute: float
    networks: tuple[Network, ...]
    source: str


_IMAGES = 1_281_158
CLUSTERS = (
    Cluster(
        "4 TITAN X (Maxwell) on PCI Express 3, 32 images each",
        gpus=4,
        rate=12e9,
        compute=32 / (100 * _IMAGES / (20 * 86400)),
        networks=(GBE1, GBE10, FDR),
        source="100 epochs took one GPU more than 20 days, of which this makes 20 (reports of the announcement of "
        "January 2017; the machine: chainer.org, 8 February 2017)",
    ),
    Cluster(
        "8 A100 on NVLink 3, 256 images each, mixed precision",
        gpus=8,
        rate=300e9,
        compute=256 / 2470,
        networks=(GBE10, EDR, NDR),
        source="2,470 images a second on one (NVIDIA's DeepLearningExamples, ResNet-50 v1.5 for PyTorch)",
    ),
)


@dataclass(frozen=True)
class Published:
    """A published result: the cluster, the number of GPUs, the efficiency, and the source."""

    cluster: int
    workers: int
    efficiency: float
    what: str


PUBLISHED = (
    Published(0, 128, 0.90, "90 %, ChainerMN on FDR (arXiv:1710.11351)"),
    Published(0, 128, 100 / 128, "100 times one GPU, ChainerMN on FDR\n(chainer.org, 8 February 2017)"),
    Published(1, 8, 16621 / (8 * 2470), "one node, NVIDIA's DeepLearningExamples"),
)


def averaging(workers: int, nbytes: float, cluster: Cluster, network: Network, use: float) -> float:
    """Return the seconds of an average by ``two_dimensional``.

    Args:
        workers: The number of GPUs; each node has all of its GPUs.
        nbytes: The size of the gradients.
        cluster: The nodes.
        network: The network between them.
        use: The part of a link's rate that is used.
    """
    inside = min(workers, cluster.gpus)
    # A ring within the node; across nodes each GPU has a part, and all of them share the node's link.
    seconds = 2 * (inside - 1) / inside * nbytes / (use * cluster.rate)
    messages = allreduce_messages(-(-workers // cluster.gpus), nbytes)
    return seconds + sum(messages) / (use * network.rate) + len(messages) * network.latency


def efficiency(workers: int, cluster: Cluster, network: Network, use: float, *, overlap: bool) -> float:
    """Return the speed of this many workers relative to the ideal, with one mini-batch for each worker."""
    if not overlap:
        return cluster.compute / (cluster.compute + averaging(workers, GRADIENT_BYTES, cluster, network, use))
    each = averaging(workers, GRADIENT_BYTES / BUCKETS, cluster, network, use)
    backward = BACKWARD * cluster.compute
    # The first bucket is ready after a part of the backward pass, the last one at its end.
    end = max(backward + each, backward / BUCKETS + BUCKETS * each)
    return cluster.compute / (cluster.compute - backward + end)


def slow_network(use: float) -> tuple[float, float]:
    """Return how much slower 10 Gbit/s Ethernet is than FDR for 32 P100 on 4 nodes: as published, and as modelled.

    ChainerMN 1.3 took 21.3 hours for 90 epochs on Ethernet and 6.96 on FDR, without overlap and in float32
    (chainer.org, 25 May 2018). Mini-batches were 64 images for 30 epochs, then 128; 96 on average over the steps.
    """
    hours = {GBE10: 21.3, FDR: 6.96}
    step = hours[FDR] * 3600 * 96 * 32 / (90 * _IMAGES)
    nodes = Cluster("8 P100", gpus=8, rate=12e9, compute=0, networks=(), source="")
    more = averaging(32, GRADIENT_BYTES, nodes, GBE10, use) - averaging(32, GRADIENT_BYTES, nodes, FDR, use)
    return hours[GBE10] / hours[FDR], 1 + more / step
