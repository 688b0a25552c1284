"""Gradients that Chainer cannot compute."""

from mn_compat.substitution import Fix, Substitution

FIXES = (
    Fix(
        "deconvolution_weights",
        "on the CPU, the gradient of deconvolution_2d with respect to its weights alone raised, or was a wrong one",
        Substitution(
            "chainer.functions.connection.deconvolution_2d",
            "self._set_cover_all(x, W)",
            "self._set_cover_all(x.shape, W.shape)",
        ),
    ),
)
