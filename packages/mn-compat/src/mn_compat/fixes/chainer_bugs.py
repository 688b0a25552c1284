"""Bugs of Chainer on every version of Python and NumPy: iterators and evaluators, and gradients."""

from mn_compat.substitution import Fix, Substitution

_ITERATOR = "chainer.iterators.multiprocess_iterator"

FIXES = (
    Fix(
        "worker_error",
        "an exception in a worker of MultiprocessIterator, or the worker's death, makes the script wait forever",
        Substitution(_ITERATOR, "import six\n", "import six; from mn_compat.helpers import worker_error as _worker\n"),
        # The first batch is read in this process, possibly in a thread.
        Substitution(
            _ITERATOR,
            "batch_ret[0] = [self.dataset[idx] for idx in indices]",
            "batch_ret[0] = _worker.outcome_of(lambda: [self.dataset[idx] for idx in indices])",
        ),
        Substitution(_ITERATOR, "batch = batch_ret[0]\n", "batch = _worker.result(batch_ret[0])\n"),
        # All other batches are read by the pool, for the thread.
        Substitution(_ITERATOR, "self._pool.map_async(_fetch_run,", "_worker.Task(self._pool, _fetch_run,"),
        Substitution(
            _ITERATOR,
            "[_unpack(data, self.mem_bulk) for data in data_all]",
            "_worker.then(data_all, lambda data: _unpack(data, self.mem_bulk))",
        ),
        Substitution(_ITERATOR, "state = self._comm.get()\n", "state = self._comm.get(); _worker.result(batch)\n"),
    ),
    Fix(
        "iterator_order",
        "a MultiprocessIterator with shuffle=False could not be saved, nor a trainer with one",
        Substitution(
            _ITERATOR,
            "order = self._state.order.copy()\n        try:\n            serializer(",
            "order = None if self._state.order is None else self._state.order.copy()\n        try:\n"
            "            order is None or serializer(",
        ),
    ),
    Fix(
        "evaluator_finalize",
        "an evaluator whose iterator is None, as in ChainerMN's old seq2seq examples, raised when training ended",
        Substitution("chainer.training.extensions.evaluator", " iterator.fin", " iterator is None or iterator.fin"),
    ),
    Fix(
        "deconvolution_weights",
        "on the CPU, the gradient of deconvolution_2d with respect to its weights alone raised, or was a wrong one",
        Substitution(
            "chainer.functions.connection.deconvolution_2d",
            "self._set_cover_all(x, W)",
            "self._set_cover_all(x.shape, W.shape)",
        ),
    ),
)
