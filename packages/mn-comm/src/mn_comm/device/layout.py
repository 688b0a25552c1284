"""The layout of gradients on devices in buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mn_comm.basis.arithmetic import sum_dtype
from mn_comm.device import staging
from mn_comm.device.bucket import DeviceBucket, DeviceStrategy
from mn_comm.device.strategies import on_device
from mn_comm.gradients.layout import Layout
from mn_comm.gradients.parts import Exchanged, Part
from mn_comm.gradients.strategies import Strategy
from mn_comm.ranks import agreement


def lay_out(layout: Layout, filled: Sequence[Sequence[Part]], likes: Sequence[Any]) -> list[DeviceBucket]:
    """Create the buckets of these parts on the gradients' device; all ranks raise if one has several; collective."""
    import cupy

    strategy, config = layout.strategy, layout.config
    devices = {array.device.id: array.device for array in likes}
    with agreement.raise_on_all(strategy.context.ranks):
        if len(devices) > 1:
            raise ValueError(f"multi_node_mean_grad: expected gradients on one device, got {sorted(devices)}")
    buckets = []
    with next(iter(devices.values())):
        way = _counterpart(strategy)  # chosen here, because only now the devices of the ranks are known
        communicator = way.connect()
        side = _side_stream(strategy) if layout.lasting else None
        dtypes = [config.allreduce_grad_dtype or layout.specs[parts[0].member][2] for parts in filled]
        if way.compresses:  # in float32, to which the packing kernel converts
            dtypes = [sum_dtype(dtype) for dtype in dtypes]
        staged = [parts for parts, dtype in zip(filled, dtypes, strict=True) if way.is_staged(dtype)]
        host_buckets = iter(layout.staging_buckets(staged))
        for index, (parts, dtype) in enumerate(zip(filled, dtypes, strict=True)):
            whole = cupy.empty(-(-parts[-1].end // way.shares) * way.shares, dtype)
            whole[parts[-1].end :] = 0
            host = next(host_buckets) if way.is_staged(dtype) else None
            if host is not None:
                staging.register(host.flat, host.memory)
            exchanged = Exchanged(layout.number, parts, layout.specs, 0)
            bucket = DeviceBucket(index, exchanged, whole, way, config, host=host, side=side)
            bucket.nccl = communicator
            buckets.append(bucket)
    return buckets


def _side_stream(strategy: Strategy) -> Any:
    """Return the stream beside the current one, for all layouts: no two streams may use what compression keeps."""
    import cupy

    device = int(cupy.cuda.Device().id)
    if device not in strategy.side_streams:
        strategy.side_streams[device] = cupy.cuda.Stream(non_blocking=True)
    return strategy.side_streams[device]


def _counterpart(strategy: Strategy) -> DeviceStrategy:
    """Return a strategy's counterpart for buckets on devices; collective when first used, on the current devices."""
    # Not functools.cached_property: before Python 3.12, all objects share its lock, so two threads that call
    # collectives here would wait for each other across ranks.
    if strategy.counterpart is None:
        if not strategy.context.may_use_devices:
            raise ValueError("expected gradients in host memory with elastic=True, got some on a device")
        strategy.counterpart = on_device(strategy)
    found: DeviceStrategy = strategy.counterpart
    return found
