import subprocess
import sys

import numpy

NEEDS = ("scipy",)
SYMPTOM = "loaded"
PARTS = ("scipy.special", "scipy.sparse", "scipy.linalg", "scipy.io")


def probe():
    import chainer.functions as F

    script = f"import sys, mn_compat, chainer; print([name for name in {PARTS} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]", f"loaded: {loaded}"
    for function, value, expected in (
        (F.erfinv, 0.5, 0.4769363),
        (F.erfcinv, 0.5, 0.4769363),
        (F.erfcx, 1.0, 0.4275836),
        (F.ndtri, 0.9, 1.2815516),
    ):
        assert abs(float(function(numpy.array([value], "f4")).array[0]) - expected) < 1e-6, function
    import chainer

    normal = chainer.distributions.MultivariateNormal(loc=numpy.zeros(2, "f4"), scale_tril=numpy.eye(2, dtype="f4"))
    assert abs(float(normal.log_prob(numpy.zeros(2, "f4")).array) + 1.837877) < 1e-5
