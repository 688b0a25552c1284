import warnings


def scatter_add(array, slices, value):
    message = "`ndarray.scatter_add` is deprecated. Please use `cupy.add.at` instead."
    warnings.warn(message, DeprecationWarning, stacklevel=2)
