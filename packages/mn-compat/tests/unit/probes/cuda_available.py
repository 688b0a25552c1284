FAKES = ("cupy_14", "no_driver")
SYMPTOM = "available is True"


def probe():
    from chainer.backends import cuda

    assert not cuda.available, "available is True"
    try:
        cuda.check_cuda_available()
    except RuntimeError as error:
        assert "no driver" in str(error), error
    else:
        raise AssertionError("check_cuda_available() passes")
