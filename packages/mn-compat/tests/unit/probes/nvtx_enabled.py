FAKES = ("cupy_14",)
SYMPTOM = "DeprecationWarning"


def probe():
    import cupy.cuda
    from chainer.function_hooks import CUDAProfileHook

    CUDAProfileHook()
    cupy.cuda.nvtx.available = False
    try:
        CUDAProfileHook()
    except RuntimeError as error:
        assert "nvtx is required" in str(error)
    else:
        raise AssertionError("expecting RuntimeError where there is no nvtx")
