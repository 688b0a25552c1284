FAKES = ("cupy_14",)
SYMPTOM = "over several axes at once"


def probe():
    import cupy
    import numpy as np
    from chainer.functions.normalization import batch_normalization, batch_renormalization

    class Array(np.ndarray):
        """Refuses what takes long on a device."""

        def sum(self, axis, **options):
            last = self.ndim - 1
            assert axis == -1 or last not in axis or set(axis) == {last}, "a sum over several axes at once"
            return super().sum(axis=axis, **options)

        def mean(self, **options):
            raise AssertionError("a mean over several axes at once")

        def var(self, **options):
            raise AssertionError("a variance over several axes at once")

    def kernel(*args, **options):
        return lambda x, mean, axis: ((x - mean) ** 2).sum(axis=(axis,))

    cupy.ndarray, cupy.ReductionKernel = Array, kernel
    implementation = batch_normalization.GeneralBatchNormalizationImpl()
    plain = np.random.RandomState(0).uniform(-1, 3, (2, 3, 4, 5)).astype("f")
    for axis, shape in (((0, 2, 3), (3,)), ((0, 3), (3, 4)), ((3,), (2, 3, 4)), ((2, 3), (2, 3)), ((1, 2, 3), (2,))):
        x, gamma = plain.view(Array), np.ones(shape, "f")
        mean, var = implementation.get_mean_and_var(axis, gamma, x, cupy, gamma.dtype)
        np.testing.assert_allclose(mean, plain.mean(axis=axis), rtol=1e-5)
        np.testing.assert_allclose(var, plain.var(axis=axis), rtol=1e-5)
        sums = implementation.get_ggamma_and_gbeta(axis, gamma, x, x, cupy)
        for found, expected in zip(sums, (plain, plain * plain), strict=True):
            np.testing.assert_allclose(found, expected.sum(axis=axis), rtol=1e-5)
    # Neither in host memory, nor where the last axis is kept, does anything change.
    for axis in (0, 2, 3), (0, 1, 2):
        mean, var = implementation.get_mean_and_var(axis, np.ones(1, "f"), plain, np, np.dtype("f"))
        np.testing.assert_array_equal(var, plain.var(axis=axis))
    source = batch_renormalization.__loader__.get_source(batch_renormalization.__name__)
    assert "= x.var(" not in source, "a variance over several axes at once in batch_renormalization"
