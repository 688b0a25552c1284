"""Iterators that read ahead: an error in a worker must reach the training script."""

from mn_compat.substitution import Fix, Substitution

_MODULE = "chainer.iterators.multiprocess_iterator"

FIXES = (
    Fix(
        "worker_error",
        "an exception in a worker of MultiprocessIterator, or the worker's death, makes the script wait forever",
        Substitution(
            _MODULE,
            "import six\n",
            "import six; from mn_compat.helpers import outcome as _outcome;"
            " from mn_compat.helpers.pool_task import Task as _PoolTask\n",
        ),
        # The first batch is read in this process, possibly in a thread.
        Substitution(
            _MODULE,
            "batch_ret[0] = [self.dataset[idx] for idx in indices]",
            "batch_ret[0] = _outcome.of(lambda: [self.dataset[idx] for idx in indices])",
        ),
        Substitution(_MODULE, "batch = batch_ret[0]\n", "batch = _outcome.result(batch_ret[0])\n"),
        # All other batches are read by the pool, for the thread.
        Substitution(_MODULE, "self._pool.map_async(_fetch_run,", "_PoolTask(self._pool, _fetch_run,"),
        Substitution(
            _MODULE,
            "[_unpack(data, self.mem_bulk) for data in data_all]",
            "_outcome.then(data_all, lambda data: _unpack(data, self.mem_bulk))",
        ),
        Substitution(
            _MODULE,
            "            batch, state = self._comm.get()\n",
            "            batch, state = _outcome.received(self._comm.get())\n",
        ),
    ),
)
