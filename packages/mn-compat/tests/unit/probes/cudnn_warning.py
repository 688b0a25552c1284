FAKES = ("cupy_14",)
SYMPTOM = "cuDNN is not enabled"


def probe():
    from chainer.backends import cuda

    assert cuda.available
    assert not cuda.cudnn_enabled
    cuda.check_cuda_available()
