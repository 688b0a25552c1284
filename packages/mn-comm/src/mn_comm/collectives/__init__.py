"""The collectives, for arrays in host memory or on a device. Each takes :class:`~mn_comm.ranks.intracomm.Ranks`."""

from mn_comm.collectives.arrays import allgather as allgather
from mn_comm.collectives.arrays import alltoall as alltoall
from mn_comm.collectives.arrays import bcast as bcast
from mn_comm.collectives.arrays import bcast_in_place as bcast_in_place
from mn_comm.collectives.arrays import gather as gather
from mn_comm.collectives.arrays import recv as recv
from mn_comm.collectives.arrays import scatter as scatter
from mn_comm.collectives.arrays import send as send
from mn_comm.collectives.halving import mean_to_each as mean_to_each
from mn_comm.collectives.halving import order_of_ranges as order_of_ranges
from mn_comm.collectives.mean import combine_in_place as combine_in_place
from mn_comm.collectives.mean import mean_in_place as mean_in_place
from mn_comm.collectives.objects import allgather_obj as allgather_obj
from mn_comm.collectives.objects import allreduce_obj as allreduce_obj
from mn_comm.collectives.objects import bcast_obj as bcast_obj
from mn_comm.collectives.objects import gather_obj as gather_obj
from mn_comm.collectives.objects import recv_obj as recv_obj
from mn_comm.collectives.objects import scatter_obj as scatter_obj
from mn_comm.collectives.objects import send_obj as send_obj
from mn_comm.collectives.reductions import allreduce as allreduce
from mn_comm.collectives.reductions import reduce as reduce
from mn_comm.collectives.reductions import reduce_scatter as reduce_scatter
from mn_comm.collectives.transport import Transport as Transport
