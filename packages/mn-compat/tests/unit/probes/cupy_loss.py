FAKES = ("cupy_broken",)
SYMPTOM = "0 warnings"


def probe():
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import chainer
    said = [str(warning.message) for warning in caught]
    assert len(said) == 1, f"{len(said)} warnings: {said}"
    assert "libcublas.so.13: cannot open shared object file" in said[0], said[0]
    assert caught[0].category is RuntimeWarning
    assert not chainer.backends.cuda.available
