FAKES = ("cupy_14",)
SYMPTOM = "does not include float16"


def probe():
    from chainer.training.updaters import multiprocess_parallel_updater as updater

    # tools/kernels.py compiles these two, and all others, with NVIDIA's compiler.
    for make in updater._memcpy_gather, updater._memcpy_scatter:
        assert "\n#include <cupy/float16.cuh>\n" in make().preamble, f"{make.__name__} does not include float16"
