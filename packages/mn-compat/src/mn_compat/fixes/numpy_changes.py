"""Names that NumPy no longer has, and calls and attributes whose results have changed."""

from mn_compat.substitution import Fix, Substitution

_AS_STRIDED = "chainer.functions.array.as_strided"
_RESIZE_IMAGES = "chainer.functions.array.resize_images"

FIXES = (
    Fix(
        "as_strided",
        "NumPy 2 has no sctypes, which as_strided reads at import and in its backward pass",
        Substitution(_AS_STRIDED, "np.sctypes['int']}", "(np.int8, np.int16, np.int32, np.int64)}"),
        Substitution(_AS_STRIDED, "gy.dtype not in np.sctypes['float']", "gy.dtype.kind != 'f'"),
    ),
    Fix(
        "resize_images",
        "NumPy 1.24 and later have no float, the dtype of resize_images' coordinates",
        Substitution(_RESIZE_IMAGES, "dtype=numpy.float)", "dtype=numpy.float64)", times=6),
    ),
    Fix(
        "categorical",
        "numpy.meshgrid returns a tuple since 2.0, and Categorical.log_prob adds a list to it",
        Substitution("chainer.distributions.categorical", "self.log_p[mg + [", "self.log_p[list(mg) + [", times=2),
    ),
    Fix(
        "variable_device",
        "NumPy arrays have a device attribute since 2.0, so debug_print shows it instead of Chainer's CPU",
        Substitution(
            "chainer.variable",
            "device = getattr(array, 'device', 'CPU')",
            "device = 'CPU' if isinstance(array, numpy.ndarray) else getattr(array, 'device', 'CPU')",
        ),
    ),
)
