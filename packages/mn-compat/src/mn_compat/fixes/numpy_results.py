"""NumPy calls and attributes whose results have changed."""

from mn_compat.substitution import Fix, Substitution

FIXES = (
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
