"""Code that still works, but gives a DeprecationWarning."""

from mn_compat.substitution import Fix, Substitution

_MAXOUT = "chainer.links.activation.maxout"

FIXES = (
    Fix(
        "maxout_shape",
        "NumPy 2.5 deprecates assigning to an array's shape, as Maxout does around a callable initializer",
        # The initializer fills a view, so the shape does not have to be restored.
        Substitution(_MAXOUT, "array.shape = (out_size", "array = array.reshape(out_size", times=2),
        Substitution(_MAXOUT, "array.shape = (linear_out_size, in_size)", ""),
        Substitution(_MAXOUT, "array.shape = linear_out_size,", ""),
    ),
    Fix(
        "fix",
        "numpy.fix is on its way out; trunc is the same function",
        Substitution("chainer.functions.math.fix", "xp.fix(x)", "xp.trunc(x)"),
    ),
    Fix(
        "convert_out",
        "NumPy deprecates a positional output array for maximum, which concat_examples passes",
        Substitution("chainer.dataset.convert", "(shape, array.shape, shape)", "(shape, array.shape, out=shape)"),
    ),
    Fix(
        "set_daemon",
        "Python 3.10 deprecates Thread.setDaemon, which MultiprocessIterator calls",
        Substitution("chainer.iterators.multiprocess_iterator", "thread.setDaemon(True)", "thread.daemon = True"),
    ),
)
