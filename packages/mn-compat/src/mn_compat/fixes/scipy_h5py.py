"""SciPy and h5py, both optional."""

from mn_compat.substitution import Fix, Substitution

FIXES = (
    Fix(
        "sparse_matmul",
        "SciPy's sparse matrices do not take float16",
        (
            Substitution(
                "chainer.functions.math.sparse_matmul",
                "    # A_data/row/col.shape: ((nb,) ldnz)\n    if not _scipy_available:",
                "    A_data, B = (x.astype(numpy.promote_types(x.dtype, 'f'), copy=False) for x in (A_data, B))\n"
                "    if not _scipy_available:",
            ),
        ),
    ),
    Fix(
        "hdf5_str",
        "h5py 3 reads a string as bytes, so a str came back as \"b'…'\"",
        (
            Substitution(
                "chainer.serializers.hdf5",
                "type(value)(numpy.asarray(dataset))",
                "dataset.asstr()[()] if isinstance(value, str) else type(value)(numpy.asarray(dataset))",
            ),
        ),
    ),
)
