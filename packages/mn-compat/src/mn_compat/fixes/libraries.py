"""Other libraries: setuptools, protobuf, SciPy and h5py.

setuptools 82 removed ``pkg_resources``, and ``numpy.distutils`` does not exist on Python 3.12. The others are optional.
"""

from mn_compat.substitution import Fix, Substitution

_ENVIRONMENT_CHECK = "chainer._environment_check"
_CAFFE = "chainer.links.caffe.protobuf3.caffe_pb2"
_SPARSE_MATMUL = "chainer.functions.math.sparse_matmul"
_SPECIAL = ("erfinv", "erfcinv", "erfcx", "ndtri")
_HELPERS = ("chainer.testing.helper", "chainer.testing.doctest_helper")

FIXES = (
    Fix(
        "environment_check",
        "the check at import needs numpy.distutils and pkg_resources, and recognises only outdated versions of CuPy",
        Substitution(_ENVIRONMENT_CHECK, "import numpy.distutils.system_info\n", "\n"),
        Substitution(_ENVIRONMENT_CHECK, "import pkg_resources\n", "\n"),
        Substitution(_ENVIRONMENT_CHECK, "def check():\n    _check_python_350()", "def check():\n    return"),
    ),
    Fix(
        "testing_requirements",
        "chainer.testing checks requirements with pkg_resources",
        *(
            Substitution(each, "import pkg_resources\n", "from mn_compat.helpers import pkg_resources\n")
            for each in _HELPERS
        ),
    ),
    Fix(
        "caffe_protobuf",
        "protobuf 4 and later refuse descriptors built piece by piece by old generated code",
        # The module embeds the whole serialized description. Current versions of protobuf build everything from it,
        # so the 5,500 lines that follow are turned into a string that is not used.
        Substitution(_CAFFE, "import reflection as _reflection", "import descriptor_pool as _descriptor_pool"),
        Substitution(
            _CAFFE,
            "from google.protobuf import symbol_database as _symbol_database",
            "from google.protobuf.internal import builder as _builder",
        ),
        Substitution(_CAFFE, "_sym_db = _symbol_database.Default()", ""),
        Substitution(
            _CAFFE,
            "_descriptor.FileDescriptor(\n  name='caffe.proto',\n  package='caffe',\n"
            "  syntax='proto2',\n  serialized_pb=",
            "_descriptor_pool.Default().AddSerializedFile(\n\n\n\n  ",
        ),
        Substitution(
            _CAFFE,
            "_sym_db.RegisterFileDescriptor(DESCRIPTOR)\n\n",
            '_builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())\nr"""\n',
        ),
        Substitution(
            _CAFFE,
            "# @@protoc_insertion_point(module_scope)",
            '""";_builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, "caffe_pb2", globals())',
        ),
    ),
    Fix(
        "scipy_on_demand",
        "importing Chainer imported much of SciPy, which takes as long as all of Chainer",
        # `import scipy` imports little: its parts are attributes, which are imported when they are first used.
        *(
            Substitution(f"chainer.functions.math.{name}", "from scipy import special", "import scipy")
            for name in _SPECIAL
        ),
        *(Substitution(f"chainer.functions.math.{name}", "(special.", "(scipy.special.") for name in _SPECIAL),
        Substitution(_SPARSE_MATMUL, "from scipy import sparse", "import scipy"),
        Substitution(_SPARSE_MATMUL, " sparse.coo_matrix(", " scipy.sparse.coo_matrix(", times=2),
        Substitution("chainer.distributions.multivariate_normal", "import scipy.linalg", "import scipy"),
        Substitution("chainer.datasets.svhn", "from scipy import io", "import scipy"),
        Substitution("chainer.datasets.svhn", " io.loadmat(", " scipy.io.loadmat("),
    ),
    Fix(
        "sparse_matmul",
        "SciPy's sparse matrices do not take float16",
        Substitution(
            _SPARSE_MATMUL,
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
