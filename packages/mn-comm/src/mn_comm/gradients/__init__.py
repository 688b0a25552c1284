"""The steps of averaging gradients: select, agree, pack, average, unpack.

Read the modules in this order: :mod:`~mn_comm.gradients.reducer`, whose ``average`` names the steps;
:mod:`~mn_comm.gradients.agree`, for which gradients take part and whether all ranks have the same;
:mod:`~mn_comm.gradients.targets` for the arrays that are read and written; :mod:`~mn_comm.gradients.bucket` for
packing, the order of averaging within and across nodes, and unpacking; and :mod:`~mn_comm.gradients.strategy` for the
messages between ranks. :mod:`~mn_comm.gradients.layout` creates buckets when gradients are first seen, and
:mod:`~mn_comm.gradients.reduction` averages in the background. What hooks, joins and compressions have to offer is in
:mod:`~mn_comm.gradients.interfaces` and :mod:`~mn_comm.gradients.compression`.
"""
