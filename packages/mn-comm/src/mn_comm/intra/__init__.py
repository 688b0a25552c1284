"""The stage within a node: shared memory where the node's processes can share it, MPI where they cannot."""

from mn_comm.intra.buffer import Buffer, shard_bounds
from mn_comm.intra.message_stage import MessageStage
from mn_comm.intra.shared_stage import SharedStage
from mn_comm.intra.stage import Stage
from mn_comm.intra.streamed import Streamed

__all__ = ["Buffer", "MessageStage", "SharedStage", "Stage", "Streamed", "shard_bounds"]
