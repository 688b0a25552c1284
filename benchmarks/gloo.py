"""The contestant that needs PyTorch: Gloo, used as in DistributedDataParallel."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

__all__ = ["make_gloo"]

WORLD = MPI.COMM_WORLD
BUCKET_BYTES = 25 * 1024 * 1024


def start_gloo() -> None:
    """Make PyTorch use one thread, and connect its ranks, once; collective."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if not dist.is_initialized():
        meeting_point = WORLD.bcast(f"file://{tempfile.mkdtemp()}/gloo")
        dist.init_process_group("gloo", init_method=meeting_point, rank=WORLD.rank, world_size=WORLD.size)


def make_gloo(params: Sequence[Any]) -> dict[str, Callable[[], None]]:
    """Return the contestant, or nothing if PyTorch is not installed."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        return {}
    start_gloo()
    groups = in_buckets(params)
    buckets = [torch.empty(sum(param.size for param in group)) for group in groups]
    views = [list(split(bucket, group)) for bucket, group in zip(buckets, groups, strict=True)]

    def run() -> None:
        works = []
        for bucket, group, parts in zip(buckets, groups, views, strict=True):
            for param, part in zip(group, parts, strict=True):
                part.copy_(torch.from_numpy(param.grad))
            bucket.div_(WORLD.size)
            works.append(dist.all_reduce(bucket, async_op=True))
        for work, group, parts in zip(works, groups, views, strict=True):
            work.wait()
            for param, part in zip(group, parts, strict=True):
                param.grad = part.numpy()

    return {"Gloo in 25 MB buckets": run}


def split(bucket: Any, group: Sequence[Any]) -> Any:
    """Yield a view of the bucket for each parameter."""
    begin = 0
    for param in group:
        yield bucket[begin : begin + param.size].view(param.shape)
        begin += param.size


def in_buckets(params: Sequence[Any]) -> list[list[Any]]:
    """Return the parameters in groups of at most 25 MB, the last ones first."""
    groups: list[list[Any]] = [[]]
    held = 0
    for param in reversed(params):
        if groups[-1] and held + param.array.nbytes > BUCKET_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(param)
        held += param.array.nbytes
    return groups
