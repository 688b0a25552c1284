"""Creates communicators, by name."""

from __future__ import annotations

from typing import Any

from mn_comm.basis import wire
from mn_comm.basis.config import Config
from mn_comm.basis.guard import guard
from mn_comm.basis.launch import check_initialized, check_launch
from mn_comm.basis.mpi import MPI
from mn_comm.communicator import Communicator
from mn_comm.ranks import agreement
from mn_comm.registry import create_elastic, kind_of, refuse_spares


def create_communicator(
    communicator_name: str = "hierarchical",
    mpi_comm: MPI.Intracomm | None = None,
    allreduce_grad_dtype: Any = None,
    batched_copy: bool = True,
    *,
    elastic: bool = False,
) -> Communicator:
    """Create a communicator; collective.

    From then on, in a job of several processes, an uncaught exception ends all of them, unless the script has its own
    ``sys.excepthook``, the session is interactive, or ``CHAINERMN_FORCE_ABORT_ON_EXCEPTION`` is 0.

    Args:
        communicator_name: How gradients are averaged: ``naive``, ``flat``, ``hierarchical``, ``two_dimensional``,
            ``single_node``, ``non_cuda_aware``, ``pure_nccl`` or ``dummy``. All except ``dummy`` compute the same
            result. ``pure_nccl`` needs gradients on devices; the others also accept gradients in host memory. Other
            packages can add names, with entry points of the group ``mn_comm.strategies``.
        mpi_comm: The ranks that take part; by default all that ``mpiexec`` started.
        allreduce_grad_dtype: The dtype in which gradients are sent: float16, bfloat16 (as the string or the dtype of
            ``ml_dtypes``), float32 or float64; ``None`` for their own dtype. Half precision is added up in float32 on
            the host, and only means are sent between hosts; NCCL adds it up without conversion. (ChainerMN 7 accepted
            this argument only for ``pure_nccl``, and raised a ValueError for the others.)
        batched_copy: Whether gradients on a device are packed by one kernel for all of them.
        elastic: Whether training continues without ranks that die, see :class:`mn_elastic.ElasticCommunicator`. It
            needs the package mn-elastic, Open MPI, started by ``mpiexec --with-ft ulfm``, and gradients in host memory.

    Returns:
        The communicator.

    Raises:
        ValueError: There is no communicator of that name, it cannot have these settings, or it cannot work on these
            hosts; or the ranks differ in an argument (on every rank).
        RuntimeError: MPI is not running in this process, for example in a worker of multiprocessing. Or
            ``pure_nccl`` was requested, and CuPy or NCCL is missing on some rank (on every rank). Or the
            launcher has started several processes, but the MPI library belongs to another implementation, so that each
            process would be alone (``CHAINERMN_ALLOW_SINGLETONS=1`` allows this). Or the communicator was to be
            elastic, and the job cannot continue without a rank that died (on every rank).
        TypeError: ``mpi_comm`` or a setting is of the wrong type.
        ImportError: The communicator of another package cannot be imported (on every rank).

    Example:
        >>> comm = chainermn.create_communicator()
        >>> comm.size
        2
        >>> flat = chainermn.create_communicator("flat", allreduce_grad_dtype="float16")
    """
    check_initialized()
    guard().started()
    check_launch(MPI.COMM_WORLD.size)
    if mpi_comm is None:
        mpi_comm = MPI.COMM_WORLD
    wire.check_intracomm(mpi_comm)
    settings = {"allreduce_grad_dtype": allreduce_grad_dtype, "batched_copy": batched_copy}
    with agreement.raise_on_all(mpi_comm):
        kind = kind_of(communicator_name)
        config = Config()
        for name, value in settings.items():
            config = config.with_value(name, value)
    used = {"communicator_name": communicator_name, **config.get(), "elastic": bool(elastic)}
    agreement.expect_same(mpi_comm, ", ".join(used), tuple(used.values()))
    if elastic:
        communicator = create_elastic(mpi_comm, kind)
    else:
        refuse_spares()
        communicator = kind(mpi_comm)
    communicator._config = config  # noqa: SLF001 - checked above
    return communicator
