import sys

SYMPTOM = "numpy.distutils|pkg_resources"


def needless():
    if sys.version_info >= (3, 12):
        return ""
    try:
        import pkg_resources  # noqa: F401
    except ImportError:
        return ""
    except Warning:
        # It exists, and says that it is deprecated.
        return ""
    return "the old setuptools is installed"


def probe():
    import chainer._environment_check

    assert chainer._environment_check.check() is None
