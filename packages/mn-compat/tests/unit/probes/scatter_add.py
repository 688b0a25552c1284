FAKES = ("cupy_14",)
SYMPTOM = "scatter_add"


def probe():
    import cupy
    from chainer.functions.array import as_strided, scatter_add, spatial_transformer_sampler
    from chainer.functions.array.get_item import GetItemGrad
    from chainer.utils import sparse

    gradient = cupy.ndarray(2)
    (total,) = GetItemGrad(([0, 0],), (3,)).forward((gradient,))
    assert cupy.added.pop() == (total, ([0, 0],), gradient)
    as_strided._index_add(total, [0, 0], gradient)
    assert cupy.added.pop() == (total, [0, 0], gradient)
    for module in scatter_add, spatial_transformer_sampler, sparse:
        source = module.__loader__.get_source(module.__name__)
        # One may be mentioned in a docstring.
        assert ".cupyx.scatter_add" not in source, f"{module.__name__} calls scatter_add"
