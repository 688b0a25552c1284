"""``pkg_resources``, which setuptools 82 removed, and ``numpy.distutils``, which does not exist on Python 3.12."""

from mn_compat.substitution import Fix, Substitution

_ENVIRONMENT_CHECK = "chainer._environment_check"
_WORKING_SET = Substitution("", "import pkg_resources\n", "import mn_compat.helpers.pkg_resources as pkg_resources\n")

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
        _WORKING_SET._replace(module="chainer.testing.helper"),
        _WORKING_SET._replace(module="chainer.testing.doctest_helper"),
    ),
)
