FAKES = ("cupy_14",)
SYMPTOM = "Use chainer.using_device instead"


def probe():
    import cupy
    from chainer.backends import cuda

    array = cupy.zeros(3)
    for device, expected in [(1, 1), (cupy.cuda.Device(2), 2), ("@cupy:3", 3), (None, 0)]:
        copy = cuda.copy(array, out_device=device)
        assert copy.copied_from is array
        assert copy.device.id == expected, (device, copy.device.id)
    with cupy.cuda.Device(1):
        other = cupy.zeros(3)
    assert cuda.copy(other).device.id == 1
