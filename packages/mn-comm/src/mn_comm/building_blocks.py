"""What packages that are built on this one use, besides the public names of :mod:`mn_comm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mn_comm.basis.guard import at_exit as at_exit
from mn_comm.basis.lazy import load_on_demand
from mn_comm.basis.mpi import MPI as MPI
from mn_comm.basis.protocols import Model as Model
from mn_comm.basis.protocols import Parameter as Parameter
from mn_comm.basis.replicas import register_synchronizer as register_synchronizer
from mn_comm.basis.replicas import synchronize_replicas as synchronize_replicas
from mn_comm.collectives.pieces import as_bytes as as_bytes
from mn_comm.collectives.pieces import pieces as pieces
from mn_comm.gradients.compression import CompressionReport as CompressionReport
from mn_comm.gradients.compression import CompressionScheme as CompressionScheme
from mn_comm.gradients.filling import Owners as Owners
from mn_comm.gradients.interfaces import AnyBucket as AnyBucket
from mn_comm.gradients.interfaces import JoinMessages as JoinMessages
from mn_comm.gradients.reducer import GradientReducer as GradientReducer
from mn_comm.gradients.reduction import Reduction as Reduction
from mn_comm.gradients.strategies import STRATEGIES as STRATEGIES
from mn_comm.gradients.targets import check_in_debug_mode as check_in_debug_mode
from mn_comm.ranks.agreement import refuse_elastic as refuse_elastic
from mn_comm.ranks.background import Worker as Worker
from mn_comm.ranks.spans import is_recording as is_recording
from mn_comm.ranks.topology import Topology as Topology
from mn_comm.ranks.watch import activity as activity
from mn_comm.ranks.watch import operation as operation
from mn_comm.ranks.watch import waiting_for as waiting_for

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks as Ranks
else:
    # Importing its module starts MPI.
    __getattr__, __dir__ = load_on_demand(__name__, {"Ranks": "ranks.intracomm"})

_NOT_OURS = {"TYPE_CHECKING", "annotations", "load_on_demand"}
__all__ = sorted({*(name for name in globals() if not name.startswith("_")), "Ranks"} - _NOT_OURS)
