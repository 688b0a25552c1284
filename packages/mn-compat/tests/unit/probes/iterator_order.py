SYMPTOM = "NoneType.*copy"


def probe():
    from chainer.iterators import MultiprocessIterator
    from chainer.serializers import npz

    iterators = [MultiprocessIterator(range(6), 2, shuffle=False, n_processes=1, shared_mem=8) for _ in range(2)]
    iterators[0].next()
    state = npz.serialize(iterators[0])
    npz.NpzDeserializer(state).load(iterators[1])
    assert iterators[1].next() == [2, 3]
    for iterator in iterators:
        iterator.finalize()
