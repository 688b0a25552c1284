"""Snapshots of all ranks, under the module name that scripts use."""

from mn_extensions.snapshot import MultiNodeSnapshot as _MultiNodeSnapshot
from mn_extensions.snapshot import multi_node_snapshot
from mn_extensions.snapshot import parse_replica_sets as _parse_replica_sets

__all__ = ["_MultiNodeSnapshot", "_parse_replica_sets", "multi_node_snapshot"]
