import contextlib

SYMPTOM = "NoneType.*copy"


def probe():
    from chainer.iterators import MultiprocessIterator
    from chainer.serializers import npz

    with contextlib.ExitStack() as stack:  # a process whose iterators are not finalized may wait for their threads
        iterators = [MultiprocessIterator(range(6), 2, shuffle=False, n_processes=1, shared_mem=8) for _ in range(2)]
        for iterator in iterators:
            stack.callback(iterator.finalize)
        iterators[0].next()
        state = npz.serialize(iterators[0])
        npz.NpzDeserializer(state).load(iterators[1])
        assert iterators[1].next() == [2, 3]
