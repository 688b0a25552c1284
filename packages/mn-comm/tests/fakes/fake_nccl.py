"""A stand-in for nccl4py: the operations are done by MPI, on the memory of the stand-in for CuPy.

It checks requirements that NCCL has but does not check: C-contiguous arrays, and CuPy's current stream.
"""

import contextlib
import enum
import itertools
import json
import threading
import types

import numpy as np
from mpi4py import MPI

calls = []
log = []  # name, thread, stream
_serial = itertools.count(1)
_version = types.SimpleNamespace(major=2, minor=32, micro=3)
_current_stream = None  # set by the fixture that puts the stand-ins in place


def get_version():
    return types.SimpleNamespace(libnccl=types.SimpleNamespace(version=_version), nccl_bindings=_version)


SUM, AVG, PROD, MAX, MIN = "sum", "avg", "prod", "max", "min"


class NcclInvalid(Exception):
    pass


class NCCLError(Exception):
    def __init__(self, status):
        super().__init__(f"NCCL_ERROR ({status})")
        self.status = status


Result = enum.IntEnum("Result", {"Success": 0, "RemoteError": 6, "InProgress": 7})


class UniqueId:
    def __init__(self, content):
        self.content = content

    def __bytes__(self):
        return self.content

    from_bytes = classmethod(lambda cls, content: cls(content))


def get_unique_id():
    return UniqueId(json.dumps([MPI.COMM_WORLD.rank, 9000 + next(_serial)]).encode())


@contextlib.contextmanager
def group():
    """Start sends immediately, and wait for them at the end."""
    _sending.append([])
    yield
    MPI.Request.Waitall(_sending.pop())


_sending = []


class Communicator:
    @classmethod
    def init(cls, size, rank, unique_id):
        calls.append("init")
        world = MPI.COMM_WORLD
        root, tag = json.loads(bytes(unique_id))
        if world.rank == root:
            found = {rank: root} | dict(world.recv(tag=tag) for _ in range(size - 1))
            for other in set(found.values()) - {root}:
                world.send(found, other, tag)
        else:
            world.send((rank, world.rank), root, tag)
            found = world.recv(source=root, tag=tag)
        self = cls()
        members = world.group.Incl([found[i] for i in range(size)])
        self.comm = world.Create_group(members, tag)
        self.nranks = size
        self.rank = rank
        return self

    state = Result.Success

    def get_async_error(self):
        return self.state

    def get_last_error(self):
        return "connection closed by the peer"

    def _take(self, name, array, stream):
        calls.append(name)
        log.append((name, threading.current_thread().name, stream))
        assert stream == _current_stream(), "expected CuPy's current stream"
        assert array.flags.c_contiguous
        assert array.size > 0
        return array._memory

    def _sum(self, name, array, op, stream):
        summands = self.comm.allgather(self._take(name, array, stream))
        if op not in (SUM, AVG):
            return {PROD: np.prod, MAX: np.max, MIN: np.min}[op](summands, axis=0)
        # Like NCCL, which divides first.
        divisor = array.dtype.type(len(summands) if op == AVG else 1)
        return np.sum([summand / divisor for summand in summands], axis=0, dtype=array.dtype)

    def allreduce(self, send, recv, op, *, stream=None):
        recv._memory[...] = self._sum("allreduce", send, op, stream)

    def reduce(self, send, recv, op, root, *, stream=None):
        total = self._sum("reduce", send, op, stream)
        if self.rank == root:
            recv._memory[...] = total

    def reduce_scatter(self, send, recv, op, *, stream=None):
        total = self._sum("reduce_scatter", send, op, stream).reshape(self.nranks, -1)
        send._memory[...] = 77  # except for the share, its contents are lost
        recv._memory[...] = total[self.rank]

    def allgather(self, send, recv, *, stream=None):
        recv._memory[...] = np.concatenate(self.comm.allgather(self._take("allgather", send, stream)))

    def broadcast(self, send, recv, root, *, stream=None):
        recv._memory[...] = self.comm.bcast(self._take("broadcast", send, stream), root)

    def send(self, array, peer, *, stream=None):
        taken = self._take("send", array, stream)
        if _sending:
            _sending[-1].append(self.comm.isend(taken.copy(), peer))
        else:
            self.comm.send(taken, peer)

    def recv(self, array, peer, *, stream=None):
        self._take("recv", array, stream)
        array._memory[...] = self.comm.recv(source=peer)

    def destroy(self):
        calls.append("destroy")
        self.comm.Free()

    def abort(self):
        calls.append("abort")
