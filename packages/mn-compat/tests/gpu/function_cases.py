"""One or more cases for every function of ``chainer.functions``.

The values are chosen such that no function is near a point where it cannot be differentiated.
"""

import chainer
import numpy as np
from chainer import functions as F
from comparing import case, flags, labels, matrices, ones, positive, signed, values, within

HALF = ("float16", "float32")
ALL = ("float16", "float32", "float64")


def _rnn(directions, gates, *, cell=False):
    """The inputs of a recurrent function of one layer: states, weights, biases and a batch of sequences."""
    weights = [signed(3, 2) if gate < gates // 2 else signed(3, 3) for _ in range(directions) for gate in range(gates)]
    biases = [signed(3)] * (directions * gates)
    states = [within(directions, 2, 3)] * (1 + cell)
    return *states, *weights, *biases, within(2, 2), within(2, 2), within(1, 2)


def _run_rnn(function, directions, gates, *, cell=False, **options):
    def run(*arguments):
        states, rest = arguments[: 1 + cell], arguments[1 + cell :]
        count = directions * gates
        weights = [list(rest[d * gates : (d + 1) * gates]) for d in range(directions)]
        biases = [list(rest[count + d * gates : count + (d + 1) * gates]) for d in range(directions)]
        return function(1, 0.0, *states, weights, biases, list(rest[2 * count :]), **options)

    return case(run, *_rnn(directions, gates, cell=cell))


class _Sampler:
    """Draws the same samples on the host and on the device."""

    def __call__(self, shape):
        return np.arange(int(np.prod(shape))).reshape(shape).astype(np.int32) % 4


def _negative_sampling(x, t, w):
    def sampler(shape):
        return x.xp.asarray(_Sampler()(shape))

    return F.negative_sampling(x, t, w, sampler, 2)


def _unpooled(x):
    y, indices = F.max_pooling_2d(x, 2, return_indices=True)
    return F.upsampling_2d(y, indices, 2, outsize=(4, 4))


def _sparse(numbers, x):
    rows, columns = x.xp.array([0, 1, 2], "i"), x.xp.array([1, 0, 3], "i")
    return F.sparse_matmul(chainer.utils.CooMatrix(numbers.array, rows, columns, (3, 4)), x)


def _normalization(function, **options):
    return case(lambda x, g, b: function(x, g, b, **options), signed(6, 3, 2), positive(3), signed(3), dtypes=HALF)


ROIS = values([[0, 1, 1, 6, 6], [1, 2, 2, 7, 5]])
BOXES = values([[1, 1, 6, 6], [2, 2, 5, 7]])
# Each class occurs, and is found at least once.
VOTES = values(np.eye(3)[[0, 1, 2, 0, 1, 2, 1, 1, 0]])
CLASSES = values([0, 1, 2, 0, 1, 2, 0, 1, 2], np.int32)
NUMBERS = values([0, 1], np.int32)
POOLED = dict(outsize=2, spatial_scale=0.6)

CASES = {
    # Elementwise
    "absolute": case(F.absolute, signed(3, 4), dtypes=ALL),
    "absolute_error": case(F.absolute_error, signed(3, 4), signed(3, 4)),
    "add": case(F.add, signed(3, 4), signed(3, 4), signed(3, 4), dtypes=ALL),
    "arccos": case(F.arccos, within(3, 4)),
    "arcsin": case(F.arcsin, within(3, 4)),
    "arctan": case(F.arctan, signed(3, 4), dtypes=HALF),
    "arctan2": case(F.arctan2, signed(3, 4), positive(3, 4)),
    "arctanh": case(F.arctanh, within(3, 4)),
    "cast": [case(lambda x: F.cast(x, "float16"), signed(3, 4)), case(lambda x: F.cast(x, "float64"), signed(3, 4))],
    "ceil": case(F.ceil, signed(3, 4)),
    "clip": case(lambda x: F.clip(x, -1.0, 0.7), signed(3, 4), dtypes=HALF),
    "clipped_relu": case(lambda x: F.clipped_relu(x, 1.1), signed(3, 4), dtypes=HALF),
    "cos": case(F.cos, signed(3, 4), dtypes=HALF),
    "cosh": case(F.cosh, signed(3, 4)),
    "crelu": case(F.crelu, signed(3, 4), dtypes=HALF),
    "digamma": case(F.digamma, positive(3, 4)),
    "elu": case(F.elu, signed(3, 4), dtypes=HALF),
    "erf": case(F.erf, signed(3, 4), dtypes=HALF),
    "erfc": case(F.erfc, signed(3, 4)),
    "erfcinv": case(F.erfcinv, positive(3, 4, high=1.7)),
    "erfcx": case(F.erfcx, signed(3, 4)),
    "erfinv": case(F.erfinv, within(3, 4)),
    "exp": case(F.exp, signed(3, 4), dtypes=ALL),
    "expm1": case(F.expm1, signed(3, 4)),
    "fix": case(F.fix, signed(3, 4)),
    "floor": case(F.floor, signed(3, 4)),
    "fmod": case(F.fmod, signed(3, 4), positive(3, 4)),
    "hard_sigmoid": case(F.hard_sigmoid, signed(3, 4), dtypes=HALF),
    "identity": case(F.identity, signed(3, 4), signed(2)),
    "leaky_relu": case(F.leaky_relu, signed(3, 4), dtypes=ALL),
    "lgamma": case(F.lgamma, positive(3, 4)),
    "linear_interpolate": case(F.linear_interpolate, positive(3, 4), signed(3, 4), signed(3, 4), dtypes=HALF),
    "log": case(F.log, positive(3, 4), dtypes=HALF),
    "log10": case(F.log10, positive(3, 4)),
    "log1p": case(F.log1p, positive(3, 4)),
    "log2": case(F.log2, positive(3, 4)),
    "log_ndtr": case(F.log_ndtr, signed(3, 4)),
    "maximum": case(F.maximum, signed(3, 4), signed(3, 4), dtypes=HALF),
    "minimum": case(F.minimum, signed(3, 4), signed(3, 4), dtypes=HALF),
    "ndtr": case(F.ndtr, signed(3, 4)),
    "ndtri": case(F.ndtri, positive(3, 4, low=0.1, high=0.9)),
    "polygamma": case(lambda n, x: F.polygamma(n, x), labels(3, 4), positive(3, 4)),
    "relu": case(F.relu, signed(3, 4), dtypes=ALL),
    "relu6": case(F.relu6, signed(3, 4)),
    "rsqrt": case(F.rsqrt, positive(3, 4), dtypes=HALF),
    "selu": case(F.selu, signed(3, 4), dtypes=HALF),
    "sigmoid": case(F.sigmoid, signed(3, 4), dtypes=ALL),
    "sign": case(F.sign, signed(3, 4)),
    "sin": case(F.sin, signed(3, 4), dtypes=HALF),
    "sinh": case(F.sinh, signed(3, 4)),
    "softplus": case(F.softplus, signed(3, 4), dtypes=HALF),
    "sqrt": case(F.sqrt, positive(3, 4), dtypes=HALF),
    "square": case(F.square, signed(3, 4), dtypes=HALF),
    "squared_difference": case(F.squared_difference, signed(3, 4), signed(3, 4)),
    "squared_error": case(F.squared_error, signed(3, 4), signed(3, 4)),
    "swish": case(F.swish, signed(3, 4), signed(4), dtypes=HALF),
    "tan": case(F.tan, within(3, 4)),
    "tanh": case(F.tanh, signed(3, 4), dtypes=ALL),
    "where": case(F.where, flags(3, 4), signed(3, 4), signed(3, 4), dtypes=HALF),
    "zeta": case(lambda x, q: F.zeta(x.array, q), positive(3, 4, low=2, high=4), positive(3, 4)),
    # Activations with parameters, or over an axis
    "log_softmax": case(F.log_softmax, signed(3, 4), dtypes=ALL),
    "lstm": case(F.lstm, signed(2, 3), signed(2, 12), dtypes=HALF),
    "maxout": case(lambda x: F.maxout(x, 2), signed(3, 4)),
    "prelu": case(F.prelu, signed(3, 4), positive(4), dtypes=HALF),
    "rrelu": case(lambda x, r: F.rrelu(x, r=r.array), signed(3, 4), positive(3, 4, low=0.13, high=0.33)),
    "slstm": case(F.slstm, signed(2, 3), signed(2, 3), signed(2, 12), signed(2, 12)),
    "softmax": [case(F.softmax, signed(3, 4), dtypes=ALL), case(lambda x: F.softmax(x, axis=2), signed(2, 3, 4))],
    "tree_lstm": case(F.tree_lstm, signed(2, 3), signed(2, 3), signed(2, 15), order=1),
    # Shapes
    "as_strided": case(lambda x: F.as_strided(x, (3, 2), (1, 2)), signed(8)),
    "broadcast": case(F.broadcast, signed(3, 1), signed(1, 4)),
    "broadcast_to": case(lambda x: F.broadcast_to(x, (2, 3, 4)), signed(3, 1)),
    "concat": case(lambda *xs: F.concat(xs), signed(3, 4), signed(3, 2), dtypes=ALL),
    "copy": case(lambda x: F.copy(x, x.device), signed(3, 4)),
    "depth2space": case(lambda x: F.depth2space(x, 2), signed(1, 8, 2, 3)),
    "diagonal": case(lambda x: F.diagonal(x, 1), signed(4, 4)),
    "dstack": case(lambda *xs: F.dstack(xs), signed(3, 4), signed(3, 4)),
    "expand_dims": case(lambda x: F.expand_dims(x, 1), signed(3, 4)),
    "flatten": case(F.flatten, signed(3, 4)),
    "flip": case(lambda x: F.flip(x, 1), signed(3, 4)),
    "fliplr": case(F.fliplr, signed(3, 4)),
    "flipud": case(F.flipud, signed(3, 4)),
    "get_item": [
        case(lambda x: F.get_item(x, (slice(None, None, 2), None, 1)), signed(3, 4), dtypes=HALF),
        case(lambda x: F.get_item(x, [0, 2, 0]), signed(3, 4), dtypes=HALF),
        case(lambda x, mask: x[mask], signed(3, 4), flags(3, 4)),
    ],
    "hstack": case(lambda *xs: F.hstack(xs), signed(3, 4), signed(3, 2)),
    "im2col": case(lambda x: F.im2col(x, 2, 1, 1), signed(2, 2, 3, 4)),
    "moveaxis": case(lambda x: F.moveaxis(x, 0, 2), signed(2, 3, 4)),
    "pad": [
        case(lambda x: F.pad(x, ((1, 2), (0, 1)), "constant", constant_values=3), signed(3, 4)),
        case(lambda x: F.pad(x, 1, "reflect"), signed(3, 4), order=0),
    ],
    "pad_sequence": case(lambda *xs: F.pad_sequence(xs, 5, -1), signed(3, 2), signed(1, 2), signed(4, 2), dtypes=HALF),
    "permutate": case(F.permutate, signed(3, 4), values([2, 0, 1], np.int32)),
    "repeat": case(lambda x: F.repeat(x, 2, 1), signed(3, 4)),
    "reshape": case(lambda x: F.reshape(x, (2, -1)), signed(3, 4)),
    "resize_images": [
        case(lambda x: F.resize_images(x, (5, 3)), signed(1, 2, 3, 4)),
        case(lambda x: F.resize_images(x, (6, 8), mode="nearest"), signed(1, 2, 3, 4)),
    ],
    "rollaxis": case(lambda x: F.rollaxis(x, 2), signed(2, 3, 4)),
    "scatter_add": case(lambda a, b: F.scatter_add(a, [0, 2, 0], b), signed(3, 4), signed(3, 4), dtypes=HALF),
    "select_item": case(F.select_item, signed(4, 3), labels(4), dtypes=HALF),
    "separate": case(F.separate, signed(3, 4)),
    "shift": case(F.shift, signed(1, 9, 4, 4), dtypes=HALF),
    "space2depth": case(lambda x: F.space2depth(x, 2), signed(1, 2, 4, 6)),
    "spatial_transformer_grid": case(lambda x: F.spatial_transformer_grid(x, (3, 4)), signed(2, 2, 3), order=1),
    "spatial_transformer_sampler": case(
        F.spatial_transformer_sampler, signed(2, 3, 4, 5), within(2, 2, 3, 4), order=1, dtypes=HALF
    ),
    "split_axis": case(lambda x: F.split_axis(x, [1, 3], 1), signed(3, 4)),
    "squeeze": case(F.squeeze, signed(3, 1, 4)),
    "stack": case(lambda *xs: F.stack(xs, 1), signed(3, 4), signed(3, 4)),
    "sum_to": case(lambda x: F.sum_to(x, (3, 1)), signed(3, 4)),
    "swapaxes": case(lambda x: F.swapaxes(x, 0, 2), signed(2, 3, 4)),
    "tile": case(lambda x: F.tile(x, (2, 3)), signed(3, 4)),
    "transpose": case(lambda x: F.transpose(x, (2, 0, 1)), signed(2, 3, 4)),
    "transpose_sequence": case(lambda *xs: F.transpose_sequence(xs), signed(3, 2), signed(2, 2), signed(1, 2)),
    "vstack": case(lambda *xs: F.vstack(xs), signed(3, 4), signed(1, 4)),
    # Reductions and comparisons
    "argmax": case(lambda x: F.argmax(x, axis=1), signed(3, 4), order=0),
    "argmin": case(lambda x: F.argmin(x, axis=1), signed(3, 4), order=0),
    "average": case(lambda x, w: F.average(x, 1, w), signed(3, 4), positive(4)),
    "batch_l2_norm_squared": case(F.batch_l2_norm_squared, signed(3, 4), dtypes=HALF),
    "cumprod": case(lambda x: F.cumprod(x, 1), signed(3, 4)),
    "cumsum": case(lambda x: F.cumsum(x, 1), signed(3, 4)),
    "logsumexp": case(lambda x: F.logsumexp(x, 1), signed(3, 4), dtypes=HALF),
    "max": case(lambda x: F.max(x, 1), signed(3, 4), dtypes=HALF),
    "mean": case(lambda x: F.mean(x, 1), signed(3, 4)),
    "min": case(lambda x: F.min(x, 1), signed(3, 4)),
    "normalize": case(F.normalize, signed(3, 4), dtypes=HALF),
    "prod": case(lambda x: F.prod(x, 1), signed(3, 4)),
    "sum": case(lambda x: F.sum(x, (0, 2)), signed(2, 3, 4), dtypes=ALL),
    # Products and linear algebra
    "batch_det": case(F.batch_det, matrices(2, 3, 3)),
    "batch_inv": case(F.batch_inv, matrices(2, 3, 3)),
    "batch_matmul": case(F.batch_matmul, signed(2, 3, 4), signed(2, 4, 2)),
    "bias": case(F.bias, signed(3, 4), signed(4)),
    "bilinear": case(F.bilinear, signed(2, 3), signed(2, 4), signed(3, 4, 2), signed(3, 2), signed(4, 2), signed(2)),
    "cholesky": case(F.cholesky, matrices(3, 3)),
    "det": case(F.det, matrices(3, 3)),
    "einsum": case(lambda a, b: F.einsum("ij,jk->ik", a, b), signed(3, 4), signed(4, 2)),
    "embed_id": case(lambda x, w: F.embed_id(x, w, 2), labels(4), signed(3, 5), dtypes=HALF),
    "fft": case(lambda a, b: F.fft((a, b)), signed(3, 8), signed(3, 8)),
    "ifft": case(lambda a, b: F.ifft((a, b)), signed(3, 8), signed(3, 8)),
    "inv": case(F.inv, matrices(3, 3)),
    "linear": case(F.linear, signed(3, 4), signed(2, 4), signed(2), dtypes=ALL),
    "matmul": [
        case(F.matmul, signed(3, 4), signed(4, 2), dtypes=ALL),
        case(lambda a, b: F.matmul(a, b, transb=True), signed(2, 3, 4), signed(2, 5, 4), dtypes=HALF),
    ],
    "scale": case(F.scale, signed(3, 4), signed(4)),
    "simplified_dropconnect": case(
        lambda x, w, b, mask: F.simplified_dropconnect(x, w, b, mask=mask),
        signed(3, 4),
        signed(2, 4),
        signed(2),
        flags(3, 2, 4),
    ),
    "sparse_matmul": case(_sparse, signed(3), signed(4, 2), dtypes=HALF),
    "tensordot": case(lambda a, b: F.tensordot(a, b, 1), signed(2, 3, 4), signed(4, 2)),
    # Convolutions and pooling
    "average_pooling_1d": case(lambda x: F.average_pooling_1d(x, 2), signed(2, 2, 6)),
    "average_pooling_2d": case(lambda x: F.average_pooling_2d(x, 3, 2, 1), signed(2, 2, 5, 6), dtypes=HALF),
    "average_pooling_3d": case(lambda x: F.average_pooling_3d(x, 2), signed(1, 2, 4, 4, 4)),
    "average_pooling_nd": case(lambda x: F.average_pooling_nd(x, 2), signed(1, 2, 4, 4)),
    "convolution_1d": case(F.convolution_1d, signed(2, 3, 6), signed(2, 3, 2), signed(2)),
    "convolution_2d": [
        case(F.convolution_2d, signed(2, 3, 5, 4), signed(2, 3, 2, 3), signed(2), dtypes=ALL),
        case(
            lambda x, w: F.convolution_2d(x, w, stride=2, pad=1, groups=2, dilate=2),
            signed(1, 4, 7, 7),
            signed(2, 2, 3, 3),
        ),
    ],
    "convolution_3d": case(F.convolution_3d, signed(1, 2, 4, 4, 4), signed(2, 2, 2, 2, 2), signed(2)),
    "convolution_nd": case(F.convolution_nd, signed(1, 2, 4, 4), signed(2, 2, 2, 2), signed(2)),
    "deconvolution_1d": case(F.deconvolution_1d, signed(2, 3, 4), signed(3, 2, 2), signed(2)),
    "deconvolution_2d": [
        case(F.deconvolution_2d, signed(2, 3, 4, 3), signed(3, 2, 2, 3), signed(2), dtypes=ALL),
        case(lambda x, w: F.deconvolution_2d(x, w, stride=2, pad=1, groups=2), signed(1, 4, 3, 3), signed(4, 1, 3, 3)),
    ],
    "deconvolution_3d": case(F.deconvolution_3d, signed(1, 2, 3, 3, 3), signed(2, 2, 2, 2, 2), signed(2)),
    "deconvolution_nd": case(F.deconvolution_nd, signed(1, 2, 3, 3), signed(2, 2, 2, 2), signed(2)),
    "deformable_convolution_2d_sampler": case(
        F.deformable_convolution_2d_sampler,
        signed(1, 2, 5, 5),
        within(1, 8, 4, 4),
        signed(3, 2, 2, 2),
        signed(3),
        order=1,
    ),
    "depthwise_convolution_2d": case(F.depthwise_convolution_2d, signed(2, 3, 5, 5), signed(2, 3, 3, 3), signed(6)),
    "dilated_convolution_2d": case(
        lambda x, w, b: F.dilated_convolution_2d(x, w, b, dilate=2), signed(1, 2, 6, 6), signed(2, 2, 2, 2), signed(2)
    ),
    "local_convolution_2d": case(F.local_convolution_2d, signed(2, 3, 4, 4), signed(2, 3, 3, 3, 2, 2), signed(2, 3, 3)),
    "max_pooling_1d": case(lambda x: F.max_pooling_1d(x, 2), signed(2, 2, 6)),
    "max_pooling_2d": case(lambda x: F.max_pooling_2d(x, 3, 2, 1), signed(2, 2, 5, 6), dtypes=HALF),
    "max_pooling_3d": case(lambda x: F.max_pooling_3d(x, 2), signed(1, 2, 4, 4, 4)),
    "max_pooling_nd": case(lambda x: F.max_pooling_nd(x, 2), signed(1, 2, 4, 4)),
    "roi_average_align_2d": case(
        lambda x, b, i: F.roi_average_align_2d(x, b.array, i, **POOLED), signed(2, 2, 8, 8), BOXES, NUMBERS, order=1
    ),
    "roi_average_pooling_2d": case(
        lambda x, b, i: F.roi_average_pooling_2d(x, b.array, i, **POOLED),
        signed(2, 2, 8, 8),
        BOXES,
        NUMBERS,
        order=1,
        dtypes=HALF,
    ),
    "roi_max_align_2d": case(
        lambda x, b, i: F.roi_max_align_2d(x, b.array, i, **POOLED), signed(2, 2, 8, 8), BOXES, NUMBERS, order=1
    ),
    "roi_max_pooling_2d": case(
        lambda x, b, i: F.roi_max_pooling_2d(x, b.array, i, **POOLED),
        signed(2, 2, 8, 8),
        BOXES,
        NUMBERS,
        order=1,
        dtypes=HALF,
    ),
    "roi_pooling_2d": case(
        lambda x, r: F.roi_pooling_2d(x, r.array, 2, 2, 0.6), signed(2, 2, 8, 8), ROIS, order=1, dtypes=HALF
    ),
    "spatial_pyramid_pooling_2d": case(lambda x: F.spatial_pyramid_pooling_2d(x, 2, "max"), signed(1, 2, 6, 6)),
    "unpooling_1d": case(lambda x: F.unpooling_1d(x, 2), signed(2, 2, 3)),
    "unpooling_2d": case(lambda x: F.unpooling_2d(x, 2), signed(2, 2, 3, 3)),
    "unpooling_3d": case(lambda x: F.unpooling_3d(x, 2), signed(1, 2, 2, 2, 2)),
    "unpooling_nd": case(lambda x: F.unpooling_nd(x, 2), signed(1, 2, 3, 3)),
    "upsampling_2d": case(_unpooled, signed(1, 2, 4, 4), dtypes=HALF),
    # Normalization and noise
    "batch_normalization": _normalization(F.batch_normalization, axis=(0, 2)),
    "batch_renormalization": case(
        lambda x, g, b, m, v: F.batch_renormalization(x, g, b, 1.5, 0.5, running_mean=m.array, running_var=v.array),
        signed(6, 3),
        positive(3),
        signed(3),
        signed(3),
        positive(3),
        order=1,
    ),
    "decorrelated_batch_normalization": case(
        lambda x: F.decorrelated_batch_normalization(x, groups=1), signed(8, 3), order=1
    ),
    "dropout": case(
        lambda x, mask: F.dropout(x, mask=2 * mask.astype(x.dtype)), signed(3, 4), flags(3, 4), dtypes=HALF
    ),
    "fixed_batch_normalization": case(
        F.fixed_batch_normalization, signed(6, 3), positive(3), signed(3), signed(3), positive(3)
    ),
    "fixed_batch_renormalization": case(
        lambda x, g, b, m, v: F.fixed_batch_renormalization(x, g, b, m.array, v.array),
        signed(6, 3),
        positive(3),
        signed(3),
        signed(3),
        positive(3),
    ),
    "fixed_decorrelated_batch_normalization": case(
        lambda x, m, p: F.fixed_decorrelated_batch_normalization(x, m.array, p.array, groups=1),
        signed(8, 3),
        signed(1, 3),
        matrices(1, 3, 3),
        order=1,
    ),
    "gaussian": case(lambda m, v, e: F.gaussian(m, v, eps=e.array), signed(3, 4), signed(3, 4), signed(3, 4)),
    "group_normalization": case(
        lambda x, g, b: F.group_normalization(x, 2, g, b), signed(2, 4, 3), positive(4), signed(4), dtypes=HALF
    ),
    "layer_normalization": case(F.layer_normalization, signed(3, 4), positive(4), signed(4), dtypes=HALF),
    "local_response_normalization": case(F.local_response_normalization, signed(2, 6, 3), order=1, dtypes=HALF),
    "zoneout": case(lambda h, x: F.zoneout(h, x, 0.0), signed(3, 4), signed(3, 4)),
    # Losses and scores
    "accuracy": case(F.accuracy, signed(6, 3), labels(6), order=0, dtypes=HALF),
    "argmax_crf1d": case(lambda c, *xs: F.argmax_crf1d(c, xs)[0], signed(3, 3), signed(2, 3), signed(2, 3), order=0),
    "bernoulli_nll": case(F.bernoulli_nll, positive(3, 4, high=0.9), signed(3, 4)),
    "binary_accuracy": case(F.binary_accuracy, signed(6), labels(6, high=2), order=0),
    "black_out": case(F.black_out, signed(2, 3), labels(2, high=4), signed(5, 3), labels(2, 3, high=4)),
    "classification_summary": case(lambda y, t: F.classification_summary(y, t, 3)[:3], VOTES, CLASSES, order=0),
    "connectionist_temporal_classification": case(
        lambda x1, x2, x3, t: F.connectionist_temporal_classification([x1, x2, x3], t + 1, 0),
        signed(2, 4),
        signed(2, 4),
        signed(2, 4),
        values([[0, 1], [2, 0]], np.int32),
        order=1,
        dtypes=HALF,
    ),
    "contrastive": case(F.contrastive, signed(4, 3), signed(4, 3), labels(4, high=2), dtypes=HALF),
    "crf1d": case(lambda c, x1, x2: F.crf1d(c, [x1, x2], _tags(x1.xp)), signed(3, 3), signed(2, 3), signed(2, 3)),
    "cross_covariance": case(F.cross_covariance, signed(4, 3), signed(4, 2)),
    "decov": case(F.decov, signed(4, 3), order=1),
    "discriminative_margin_based_clustering_loss": case(
        lambda x, t: F.discriminative_margin_based_clustering_loss(x, t, 0.5, 1.5, 2),
        signed(1, 2, 4, 4),
        labels(1, 4, 4),
        order=1,
    ),
    "f1_score": case(lambda y, t: F.f1_score(y, t, 3)[0], VOTES, CLASSES, order=0),
    "gaussian_kl_divergence": case(F.gaussian_kl_divergence, signed(3, 4), signed(3, 4)),
    "gaussian_nll": case(F.gaussian_nll, signed(3, 4), signed(3, 4), signed(3, 4)),
    "hinge": case(F.hinge, signed(4, 3), labels(4), order=1, dtypes=HALF),
    "huber_loss": case(lambda x, t: F.huber_loss(x, t, 1.0), signed(4, 3), signed(4, 3), dtypes=HALF),
    "mean_absolute_error": case(F.mean_absolute_error, signed(3, 4), signed(3, 4), dtypes=HALF),
    "mean_squared_error": case(F.mean_squared_error, signed(3, 4), signed(3, 4), dtypes=HALF),
    "negative_sampling": case(_negative_sampling, signed(2, 3), labels(2), signed(4, 3), dtypes=HALF),
    "precision": case(lambda y, t: F.precision(y, t, 3)[0], VOTES, CLASSES, order=0),
    "r2_score": case(lambda y, t: F.r2_score(y, t), signed(6), signed(6), order=0),
    "recall": case(lambda y, t: F.recall(y, t, 3)[0], VOTES, CLASSES, order=0),
    "sigmoid_cross_entropy": case(F.sigmoid_cross_entropy, signed(3, 4), labels(3, 4, high=2), dtypes=HALF),
    "softmax_cross_entropy": [
        case(F.softmax_cross_entropy, signed(4, 3), labels(4), order=1, dtypes=ALL),
        case(
            lambda x, t: F.softmax_cross_entropy(x, t, enable_double_backprop=True, reduce="no"),
            signed(4, 3),
            labels(4),
        ),
        case(F.softmax_cross_entropy, signed(2, 3, 4, 4), labels(2, 4, 4), order=1),
    ],
    "triplet": case(F.triplet, signed(4, 3), signed(4, 3), signed(4, 3), dtypes=HALF),
    # Recurrent
    "n_step_bigru": _run_rnn(F.n_step_bigru, 2, 6),
    "n_step_bilstm": _run_rnn(F.n_step_bilstm, 2, 8, cell=True),
    "n_step_birnn": _run_rnn(F.n_step_birnn, 2, 2),
    "n_step_gru": _run_rnn(F.n_step_gru, 1, 6),
    "n_step_lstm": _run_rnn(F.n_step_lstm, 1, 8, cell=True),
    "n_step_rnn": _run_rnn(F.n_step_rnn, 1, 2, activation="relu"),
    # Others
    "forget": case(lambda x: F.forget(F.tanh, x), signed(3, 4), order=1),
    "gumbel_softmax": case(lambda x: F.sum(F.gumbel_softmax(x), axis=1), ones(3, 4), order=0),
}


def _tags(xp):
    return [xp.array([0, 2], "i"), xp.array([1, 1], "i")]
