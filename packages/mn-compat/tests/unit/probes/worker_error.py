import os

# Without the fix it waits forever, so the alarm rings. With it, a busy machine must not ring: conftest.py waits 60 s.
PATIENCE = 5 if "MN_COMPAT_SKIP" in os.environ else 40
SYMPTOM = "no error within 5 s"


class Data:
    def __len__(self):
        return 12

    def __getitem__(self, i):
        if i in (0, 5):
            raise KeyError(f"no sample {i}")
        return i


class Deadly(Data):
    def __getitem__(self, i):
        import multiprocessing

        if i == 5 and multiprocessing.parent_process():
            os._exit(3)
        return i


def probe():
    import multiprocessing
    import signal
    import threading

    from chainer.iterators import MultiprocessIterator

    def give_up(*_):
        raise TimeoutError(f"no error within {PATIENCE} s, after {batches} and {errors}")

    errors, batches = [], []
    threading.excepthook = lambda _: None
    multiprocessing.set_start_method("fork", force=True)  # no other code can import this module
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE)
    iterator = MultiprocessIterator(Data(), 2, repeat=False, shuffle=False, n_processes=1, dataset_timeout=None)
    for _ in range(6):
        try:
            batches.append(next(iterator))
        except KeyError as error:
            errors.append(str(error))
    signal.alarm(0)
    iterator.finalize()
    assert errors == ["'no sample 0'", "'no sample 5'"], errors
    assert batches == [[2, 3], [6, 7], [8, 9], [10, 11]], batches
    errors.clear()
    batches.clear()
    signal.alarm(PATIENCE)
    iterator = MultiprocessIterator(Deadly(), 2, repeat=False, shuffle=False, n_processes=1, dataset_timeout=None)
    for _ in range(4):
        try:
            batches.append(next(iterator))
        except RuntimeError as error:
            errors.append(str(error))
    signal.alarm(0)
    iterator.finalize()
    assert batches == [[0, 1], [2, 3]], batches
    assert [error.split(" ", 3)[3] for error in errors] == 2 * [
        "of the iterator ended with status 3, so the samples that it was reading are lost"
    ], errors
