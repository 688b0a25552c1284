"""SciPy and h5py, both optional."""

from mn_compat.substitution import Fix, Substitution

_SPECIAL = ("erfinv", "erfcinv", "erfcx", "ndtri")

FIXES = (
    Fix(
        "scipy_on_demand",
        "importing Chainer imported much of SciPy, which takes as long as all of Chainer",
        # `import scipy` imports little: its parts are attributes, which are imported when they are first used.
        *(
            each
            for name in _SPECIAL
            for each in (
                Substitution(f"chainer.functions.math.{name}", "from scipy import special", "import scipy"),
                Substitution(f"chainer.functions.math.{name}", f"(special.{name}(", f"(scipy.special.{name}("),
            )
        ),
        Substitution("chainer.functions.math.sparse_matmul", "from scipy import sparse", "import scipy"),
        Substitution("chainer.functions.math.sparse_matmul", " sparse.coo_matrix(", " scipy.sparse.coo_matrix(", 2),
        Substitution("chainer.distributions.multivariate_normal", "import scipy.linalg", "import scipy"),
        Substitution("chainer.datasets.svhn", "from scipy import io", "import scipy"),
        Substitution("chainer.datasets.svhn", " io.loadmat(", " scipy.io.loadmat("),
    ),
    Fix(
        "sparse_matmul",
        "SciPy's sparse matrices do not take float16",
        Substitution(
            "chainer.functions.math.sparse_matmul",
            "    # A_data/row/col.shape: ((nb,) ldnz)\n    if not _scipy_available:",
            "    A_data, B = (x.astype(numpy.promote_types(x.dtype, 'f'), copy=False) for x in (A_data, B))\n"
            "    if not _scipy_available:",
        ),
    ),
    Fix(
        "hdf5_str",
        "h5py 3 reads a string as bytes, so a str came back as \"b'…'\"",
        Substitution(
            "chainer.serializers.hdf5",
            "type(value)(numpy.asarray(dataset))",
            "dataset.asstr()[()] if isinstance(value, str) else type(value)(numpy.asarray(dataset))",
        ),
    ),
)
