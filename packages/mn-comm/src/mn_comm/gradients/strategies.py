"""The strategies: by name, which ranks share the work of averaging. What they do is in :mod:`.gradients.strategy`."""

from __future__ import annotations

from mn_comm.gradients.strategy import ALL, Strategy

__all__ = ["ALL", "STRATEGIES", "Strategy"]


class _Hierarchical(Strategy):
    """Averages gradients on each node, then among the first ranks of the nodes; the default."""

    name = "hierarchical"
    leaders_per_node = 1
    on_device = "nodes"


class _TwoDimensional(Strategy):
    """Each rank of a node exchanges its share with other nodes; for several network cards."""

    name = "two_dimensional"
    leaders_per_node = ALL
    on_device = "nodes"


class _PureNccl(Strategy):
    """Averages gradients on devices together, with NCCL among all ranks; refuses host memory."""

    name = "pure_nccl"
    on_host = False
    on_device = "nccl"


class _Flat(Strategy):
    """Averages gradients together, with MPI among all ranks."""

    name = "flat"
    on_device = "mpi"


class _SingleNode(Strategy):
    """Like ``two_dimensional``, but only for one node; refuses several nodes."""

    name = "single_node"
    leaders_per_node = ALL
    one_node = True
    on_device = "nodes"


class _NonCudaAware(Strategy):
    """Like ``two_dimensional``, but arrays on devices are always copied through host memory."""

    name = "non_cuda_aware"
    leaders_per_node = ALL


class _Naive(Strategy):
    """Averages gradients one by one; works everywhere, and is the reference for tests of the others."""

    name = "naive"
    packs = False
    on_device = "mpi"


class _Dummy(Strategy):
    """Packs and unpacks but does not communicate, to measure the cost of packing."""

    name = "dummy"
    communicates = False
    on_device = "alone"


STRATEGIES: dict[str, type[Strategy]] = {
    kind.name: kind
    for kind in (_Hierarchical, _TwoDimensional, _PureNccl, _Flat, _SingleNode, _NonCudaAware, _Naive, _Dummy)
}
"""The strategies by name, in the order of recommendation among those that are equally fast; those of other packages are
added when they are first used."""
