FAKES = ("cupy_14",)
SYMPTOM = "scatter_add"


def probe():
    import cupy
    import cupyx
    from chainer.functions.array.get_item import GetItemGrad

    gradient = cupy.ndarray(2)
    (total,) = GetItemGrad(([0, 0],), (3,)).forward((gradient,))
    assert cupyx.added == [(total, ([0, 0],), gradient)]
