import unittest

SYMPTOM = "pkg_resources"


def skipped(decorator):
    class Case(unittest.TestCase):
        @decorator
        def test(self):
            pass

    result = unittest.TestResult()
    Case("test").run(result)
    return bool(result.skipped)


def probe():
    from chainer import testing
    from chainer.testing import doctest_helper

    assert not skipped(testing.with_requires("numpy>=1.26"))
    assert not skipped(testing.with_requires("numpy>=1.26", "chainer>=7"))
    assert skipped(testing.with_requires("numpy>=1.26", "chainer<7"))
    assert skipped(testing.with_requires("a-package-nobody-has"))
    assert not skipped(testing.with_requires("a-package-nobody-has; python_version < '3'"))
    assert skipped(testing.without_requires("numpy>=1.26"))
    assert not skipped(testing.without_requires("numpy<1.26"))
    assert doctest_helper.skipif_requires_satisfied("numpy>=1.26")
    assert not doctest_helper.skipif_requires_satisfied("numpy<1.26")
