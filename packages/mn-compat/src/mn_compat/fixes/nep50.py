"""NumPy 2's promotion rules (NEP 50): a NumPy scalar keeps its dtype, but was converted before.

So sums of scalars stay in float16, a float64 scalar converts a float32 array to float64, and a Python integer outside
the range of an array's dtype is an error.
"""

from mn_compat.substitution import Fix, Substitution

_MICRO_AVERAGE = "chainer.training.extensions.micro_average"
_CLIPPING = "chainer.optimizer_hooks.gradient_clipping"
_LARS = "chainer.optimizer_hooks.gradient_lars"
_PAD_SEQUENCE = "chainer.functions.array.pad_sequence"


def _in_float64(module: str, scale: str, names: tuple[str, ...], times: int = 2) -> tuple[Substitution, ...]:
    """Scale coordinates in float64, which the following rounding needs."""
    module = f"chainer.functions.pooling.{module}"
    return tuple(Substitution(module, f"{name} * {scale}", f"numpy.float64({name}) * {scale}", times) for name in names)


def _as_float(module: str, *names: str, times: int = 1) -> tuple[Substitution, ...]:
    """Store arguments as Python floats, which take the dtype of the array."""
    module = f"chainer.functions.normalization.{module}"
    return tuple(
        Substitution(module, f"self.{name} = {name}\n", f"self.{name} = float({name})\n", times) for name in names
    )


def _import(module: str, after: str, helper: str) -> Substitution:
    """Import a helper in the first of the two blank lines after a module's last import."""
    return Substitution(module, f"{after}\n\n", f"{after}\nfrom mn_compat.helpers.precision import {helper}\n")


_CORNERS = ("bottom_rois[n, 0]", "bottom_rois[n, 1]", "bottom_rois[n, 2]", "bottom_rois[n, 3]")
_EDGES = ("xmin", "ymin", "xmax", "ymax")

FIXES = (
    Fix(
        "reporter",
        "Summary kept its sums in the precision of the values: 2,000 float16 values of mean 1.2 gave 1.15",
        _import("chainer.reporter", "import chainerx", "widened"),
        Substitution(
            "chainer.reporter",
            "value = value.as_grad_stopped()\n\n",
            "value = value.as_grad_stopped()\n        value, weight = widened(value), widened(weight)\n",
        ),
    ),
    Fix(
        "micro_average",
        "MicroAverage kept its sums in the precision of the values, as Summary did",
        _import(_MICRO_AVERAGE, "from chainer.training import util", "widened"),
        *(
            Substitution(_MICRO_AVERAGE, f"observation[self._{name}_key]", f"widened(observation[self._{name}_key])")
            for name in ("numerator", "denominator")
        ),
    ),
    Fix(
        "gradient_norms",
        "GradientClipping and GradientLARS computed norms in float16, where a sum overflows and eps is zero",
        _import(_CLIPPING, "from chainer import backend", "double"),
        Substitution(_CLIPPING, "dots.append(g.dot(g))", "dots.append(double(g.dot(g)))"),
        _import(_LARS, "from chainer import backend", "double"),
        Substitution(_LARS, "xp.linalg.norm(p)", "double(xp.linalg.norm(p))"),
        Substitution(_LARS, "xp.linalg.norm(g)", "double(xp.linalg.norm(g))"),
    ),
    Fix(
        "gumbel_softmax",
        "a NumPy scalar as tau turned the result of gumbel_softmax on an array into float64",
        Substitution(
            "chainer.functions.noise.gumbel_softmax", "(log_pi + g) / tau", "variable.as_variable(log_pi + g) / tau"
        ),
    ),
    Fix(
        "pad_sequence",
        "padding an unsigned array with -1 raised OverflowError",
        Substitution(_PAD_SEQUENCE, "] = self.padding", "] = numpy.asarray(self.padding).astype(y.dtype)[()]"),
        Substitution(_PAD_SEQUENCE, ", self.padding,", ", numpy.asarray(self.padding).astype(y.dtype)[()],"),
    ),
    Fix(
        "concat_padding",
        "concat_examples raised OverflowError where it pads unsigned arrays with -1",
        Substitution(
            "chainer.dataset.convert",
            "xp.full(shape, padding, dtype",
            "xp.full(shape, numpy.asarray(padding).astype(arrays[0].dtype)[()], dtype",
        ),
    ),
    Fix(
        "roi",
        "the ROI functions scaled their coordinates in float32 on the CPU and could pick a neighbouring bin",
        *_in_float64("roi_average_align_2d", "spatial_scale", _CORNERS),
        *_in_float64("roi_max_align_2d", "spatial_scale", _CORNERS),
        *_in_float64("roi_average_pooling_2d", "self.spatial_scale", _EDGES),
        *_in_float64("roi_max_pooling_2d", "self.spatial_scale", _EDGES, times=1),
        *_in_float64("roi_pooling_2d", "self.spatial_scale", _EDGES),
    ),
    Fix(
        "layer_normalization",
        "a NumPy scalar as eps made the backward pass of layer_normalization fail",
        *_as_float("layer_normalization", "eps"),
    ),
    Fix(
        "local_response_normalization",
        "NumPy scalars as k, alpha or beta made local_response_normalization raise",
        *_as_float("local_response_normalization", "k", "alpha", "beta", times=2),
    ),
    Fix(
        "batch_renormalization",
        "NumPy scalars as rmax or dmax made batch_renormalization raise",
        *_as_float("batch_renormalization", "rmax", "dmax"),
    ),
    Fix(
        "hyperparameter",
        "a NumPy scalar as a hyperparameter turned the state of an optimizer (SMORMS3's) into float64",
        _import("chainer.optimizer", "import chainerx", "set_python_scalar"),
        Substitution(
            "chainer.optimizer",
            "self._parent = parent\n\n",
            "self._parent = parent\n    __setattr__ = set_python_scalar\n",
        ),
    ),
)
