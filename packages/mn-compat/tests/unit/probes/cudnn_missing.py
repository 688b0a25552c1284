FAKES = ("cupy_14",)
SYMPTOM = "0 warnings"


def probe():
    import warnings

    import chainer

    for setting, expected in [("auto", 0), ("never", 0), ("always", 1), ("always", 0)]:
        with warnings.catch_warnings(record=True) as caught, chainer.using_config("use_cudnn", setting):
            warnings.simplefilter("always")
            assert not chainer.should_use_cudnn(">=auto")
        assert len(caught) == expected, f"{len(caught)} warnings for {setting}"
        assert all("CuPy 14.2.0 has no cuDNN" in str(warning.message) for warning in caught)
    with chainer.using_config("compute_mode", "cudnn_fast"):
        try:
            chainer.links.Convolution2D(3, 4, 3)
        except RuntimeError as error:
            assert "needs cuDNN, and CuPy 14.2.0 has none" in str(error), error
        else:
            raise AssertionError("cudnn_fast is accepted")
