"""Mistakes in ``mn_comm``'s code for devices, one line each, and for each a test that must find it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["MISTAKES", "Mistake"]

_UNIT = "packages/mn-comm/tests/unit/test_on_gpu.py"
_RANKS = "packages/mn-comm/tests/mpi/test_on_gpu.py"
# The side stream is always late, and only that: a random delay would have to fall on the only operation that matters.
_LATE_SIDE = {"GPU_EMULATOR_SIDE_US": "20000", "GPU_EMULATOR_IDLE_US": "0", "GPU_EMULATOR_DELAY_US": "0"}


class Mistake(NamedTuple):
    """A text that is replaced.

    Attributes:
        file: In ``mn_comm``.
        right: What is there, once.
        wrong: What takes its place.
        test: What must fail; on two ranks if it is in a folder ``mpi``.
        settings: The emulator's settings for it.
    """

    file: str
    right: str
    wrong: str
    test: str
    settings: Mapping[str, str] = MappingProxyType({})


MISTAKES = {
    "the host does not wait for a staged mean": Mistake(
        "device/bucket.py",
        """\
            stream.synchronize()  # next, ranks may reuse pinned memory, and another stream uses the result
""",
        "",
        f"{_RANKS}::test_a_model_on_a_device_that_is_not_the_current_one[flat-True]",
        _LATE_SIDE,
    ),
    "a mean by a CUDA-aware MPI library is used before its division": Mistake(
        "device/bucket.py",
        """\
            stream.synchronize()  # next, ranks may reuse pinned memory, and another stream uses the result
""",
        "",
        f"{_RANKS}::test_cuda_aware_mpi_in_the_background[flat]",
    ),
    "the side stream does not wait for packing": Mistake(
        "device/bucket.py",
        "        packed = self.packed()\n",
        "        packed = None\n",
        f"{_RANKS}::test_on_another_stream_and_in_the_background[flat]",
    ),
    "a stream does not wait for the one that was used before": Mistake(
        "device/bucket.py",
        "        _let_wait(current, self._streams[1:], self.flat.device)\n",
        "        pass\n",
        f"{_UNIT}::test_a_stream_that_comes_later_waits_for_the_one_before",
    ),
    "memory is reused before the end of a mean that nobody waits for": Mistake(
        "device/bucket.py",
        "        weakref.finalize(self, _let_wait, allocated_on, self._streams, whole.device).atexit = False\n",
        "        pass\n",
        f"{_RANKS}::test_a_mean_that_nobody_waits_for_does_not_overwrite_other_arrays",
    ),
    "the pinned memory of addresses is reused before their copy": Mistake(
        "device/kernels.py",
        "            staging.keep_until(self._uploaded, self._host)  # this object may be gone earlier\n",
        "            pass\n",
        f"{_RANKS}::test_addresses_are_not_overwritten_before_they_are_uploaded",
    ),
    "a table of addresses is overwritten before its copy": Mistake(
        "device/kernels.py",
        "                self._uploaded.synchronize()  # the copy of the last step may not have started yet\n",
        "                pass\n",
        f"{_UNIT}::test_a_table_that_changes_before_it_was_copied",
    ),
    "an event is recorded on another device": Mistake(
        "device/bucket.py",
        "        with self.flat.device:  # each device has its own current stream\n",
        "        if True:\n",
        f"{_RANKS}::test_a_model_on_a_device_that_is_not_the_current_one[flat-True]",
    ),
    "the stream of another device waits for the mean": Mistake(
        "device/strategies.py",
        "        with self._bucket.flat.device:  # each device has its own current stream\n",
        "        if True:\n",
        f"{_RANKS}::test_a_model_on_a_device_that_is_not_the_current_one[pure_nccl-True]",
    ),
    "pieces of memory are pinned one by one": Mistake(
        "device/staging.py",
        "    address = memory.ctypes.data\n",
        "    memory = array\n    address = memory.ctypes.data\n",
        f"{_UNIT}::test_arrays_that_overlap_in_pinned_memory",
    ),
    "memory is unpinned while another array needs it": Mistake(
        "device/staging.py",
        "    if not _users[address]:\n        del _users[address]\n",
        "    if address in _users:\n        del _users[address]\n",
        f"{_UNIT}::test_arrays_that_overlap_in_pinned_memory",
    ),
    "ranks call NCCL in different orders": Mistake(
        "device/strategies.py",
        "        bucket.nccl.all_reduce(bucket.flat, mean=True)\n",
        """\
        own, flat = bucket.nccl, bucket.flat
        calls = [lambda: own.all_reduce(flat, mean=True), lambda: own.broadcast(flat, 0)]
        for call in calls[:: 1 - 2 * (own._rank % 2)]:
            call()
""",
        f"{_RANKS}::test_buckets_of_different_sizes[pure_nccl-sizes0]",
    ),
    "a gradient is converted by way of a narrower dtype": Mistake(
        "device/kernels.py",
        'between="double" if np.float64 in (grad, wire) else "float"',
        'between="float"',
        f"{_UNIT}::test_packing_and_unpacking[f8-f8-True-c]",
    ),
    "gradients of float32 are sent in float16": Mistake(
        "device/layout.py",
        "        dtypes = [config.allreduce_grad_dtype or layout.specs[parts[0].member][2] for parts in filled]\n",
        "        dtypes = [np.dtype(np.float16) for parts in filled]\n",
        f"{_RANKS}::test_buckets_of_different_sizes[pure_nccl-sizes0]",
    ),
    "each set of buckets has a stream of its own": Mistake(
        "device/layout.py",
        "    return strategy.side_streams[device]\n",
        "    return cupy.cuda.Stream(non_blocking=True)\n",
        "packages/mn-comm/tests/mpi/test_device.py::test_two_reductions_use_one_stream_beside_the_program_s[pure_nccl]",
    ),
    "a thread of the program calls NCCL": Mistake(
        "device/strategies.py",
        '    return "mpi" if uses_nccl and strategy.context.is_apart else strategy.on_device\n',
        '    return strategy.on_device if uses_nccl else "mpi"\n',
        "packages/mn-comm/tests/mpi/test_device.py::test_a_thread_of_the_program_does_not_call_nccl[pure_nccl]",
    ),
}
