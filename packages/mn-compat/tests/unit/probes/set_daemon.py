SYMPTOM = "setDaemon"


def probe():
    import threading

    from chainer.iterators import MultiprocessIterator

    with MultiprocessIterator(list(range(8)), 4, repeat=False, shuffle=False, n_processes=1) as iterator:
        assert iterator.next() == [0, 1, 2, 3]
        assert iterator.next() == [4, 5, 6, 7]
        daemons = [thread.daemon for thread in threading.enumerate() if thread.name == "prefetch_loop"]
        assert all(daemons), daemons
