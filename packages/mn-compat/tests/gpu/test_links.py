"""Every link of Chainer gives the same results and gradients on the device as on the host."""

import inspect

import chainer
import numpy as np
import pytest
from chainer import functions as F
from chainer import links as L

pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu


def floats(*shape):
    return np.random.RandomState(1).standard_normal(shape).astype(np.float32)


def integers(*shape, high=3):
    return np.random.RandomState(2).randint(0, high, shape).astype(np.int32)


SEQUENCES = [floats(3, 2), floats(2, 2), floats(1, 2)]
IMAGE = floats(2, 3, 6, 6)


def _twice(link, x):
    """Two steps of a link with a state."""
    return link(x), link(x * 2)


def _with_state(link, x):
    states = [link.xp.ones((len(x), 4), np.float32)]
    return link(*states, x)


def _with_two_states(link, x):
    ones = link.xp.ones((len(x), 4), np.float32)
    return link(ones, ones * 2, x)


def _sequences(link, *xs):
    return link(None, list(xs))


def _sequences_with_cells(link, *xs):
    return link(None, None, list(xs))


def _huffman():
    return L.BinaryHierarchicalSoftmax(4, L.BinaryHierarchicalSoftmax.create_huffman_tree({0: 8, 1: 5, 2: 6, 3: 4}))


# How a link is made, how it is called, and with what.
CASES = {
    "BatchNormalization": (lambda: L.BatchNormalization(3), None, IMAGE),
    "BatchRenormalization": (lambda: L.BatchRenormalization(3), None, floats(6, 3)),
    "Bias": (lambda: L.Bias(shape=(3,)), None, IMAGE),
    "Bilinear": (lambda: L.Bilinear(3, 4, 5), None, floats(2, 3), floats(2, 4)),
    "BinaryHierarchicalSoftmax": (_huffman, None, floats(3, 4), integers(3)),
    "CRF1d": (
        lambda: L.CRF1d(3),
        lambda link, a, b: link([a, b], [link.xp.array([0, 2], "i"), link.xp.array([1, 1], "i")]),
        floats(2, 3),
        floats(2, 3),
    ),
    "ChildSumTreeLSTM": (
        lambda: L.ChildSumTreeLSTM(2, 4),
        lambda link, x: link(*[link.xp.ones((3, 4), np.float32)] * 4, x),
        floats(3, 2),
    ),
    "Classifier": (lambda: L.Classifier(L.Linear(4, 3)), None, floats(5, 4), integers(5)),
    "Convolution1D": (lambda: L.Convolution1D(3, 4, 3), None, floats(2, 3, 6)),
    "Convolution2D": (lambda: L.Convolution2D(3, 4, 3, 2, 1), None, IMAGE),
    "Convolution3D": (lambda: L.Convolution3D(3, 4, 2), None, floats(1, 3, 3, 3, 3)),
    "ConvolutionND": (lambda: L.ConvolutionND(2, 3, 4, 3), None, IMAGE),
    "Deconvolution1D": (lambda: L.Deconvolution1D(3, 4, 3), None, floats(2, 3, 6)),
    "Deconvolution2D": (lambda: L.Deconvolution2D(3, 4, 3, 2, 1), None, IMAGE),
    "Deconvolution3D": (lambda: L.Deconvolution3D(3, 4, 2), None, floats(1, 3, 3, 3, 3)),
    "DeconvolutionND": (lambda: L.DeconvolutionND(2, 3, 4, 3), None, IMAGE),
    "DecorrelatedBatchNormalization": (lambda: L.DecorrelatedBatchNormalization(4, 2), None, floats(9, 4)),
    "DeformableConvolution2D": (
        lambda: L.DeformableConvolution2D(3, 4, 3, offset_initialW=0.1),
        None,
        IMAGE,
    ),
    "DepthwiseConvolution2D": (lambda: L.DepthwiseConvolution2D(3, 2, 3), None, IMAGE),
    "DilatedConvolution2D": (lambda: L.DilatedConvolution2D(3, 4, 2, dilate=2), None, IMAGE),
    "EmbedID": (lambda: L.EmbedID(4, 3, ignore_label=2), None, integers(5, high=4)),
    "GRU": (lambda: L.GRU(3, 4), _twice, floats(2, 3)),
    "GroupNormalization": (lambda: L.GroupNormalization(3), None, IMAGE),
    "Highway": (lambda: L.Highway(3), None, floats(2, 3)),
    "Inception": (lambda: L.Inception(3, 2, 2, 2, 2, 2, 2), None, IMAGE),
    "InceptionBN": (lambda: L.InceptionBN(3, 2, 2, 2, 2, 2, "max", 2), None, IMAGE),
    "LSTM": (lambda: L.LSTM(3, 4), _twice, floats(2, 3)),
    "LayerNormalization": (lambda: L.LayerNormalization(3), None, floats(2, 3)),
    "Linear": (lambda: L.Linear(None, 4), None, IMAGE),
    "LocalConvolution2D": (lambda: L.LocalConvolution2D(3, 2, 6, ksize=3), None, IMAGE),
    "MLPConvolution2D": (lambda: L.MLPConvolution2D(3, (4, 2), 3), None, IMAGE),
    "Maxout": (lambda: L.Maxout(3, 4, 2), None, floats(2, 3)),
    "NStepBiGRU": (lambda: L.NStepBiGRU(2, 2, 3, 0.0), _sequences, *SEQUENCES),
    "NStepBiLSTM": (lambda: L.NStepBiLSTM(2, 2, 3, 0.0), _sequences_with_cells, *SEQUENCES),
    "NStepBiRNNReLU": (lambda: L.NStepBiRNNReLU(1, 2, 3, 0.0), _sequences, *SEQUENCES),
    "NStepBiRNNTanh": (lambda: L.NStepBiRNNTanh(1, 2, 3, 0.0), _sequences, *SEQUENCES),
    "NStepGRU": (lambda: L.NStepGRU(2, 2, 3, 0.0), _sequences, *SEQUENCES),
    "NStepLSTM": (lambda: L.NStepLSTM(2, 2, 3, 0.0), _sequences_with_cells, *SEQUENCES),
    "NStepRNNReLU": (lambda: L.NStepRNNReLU(1, 2, 3, 0.0), _sequences, *SEQUENCES),
    "NStepRNNTanh": (lambda: L.NStepRNNTanh(1, 2, 3, 0.0), _sequences, *SEQUENCES),
    "NaryTreeLSTM": (
        lambda: L.NaryTreeLSTM(2, 4, 2),
        lambda link, x: link(*[link.xp.ones((3, 4), np.float32)] * 4, x),
        floats(3, 2),
    ),
    "PReLU": (lambda: L.PReLU((3,)), None, floats(2, 3)),
    "Parameter": (lambda: L.Parameter(floats(2, 3)), lambda link: link()),
    "Scale": (lambda: L.Scale(W_shape=(3,)), None, IMAGE),
    "StatefulGRU": (lambda: L.StatefulGRU(3, 4), _twice, floats(2, 3)),
    "StatefulMGU": (lambda: L.StatefulMGU(3, 4), _twice, floats(2, 3)),
    "StatefulPeepholeLSTM": (lambda: L.StatefulPeepholeLSTM(3, 4), _twice, floats(2, 3)),
    "StatefulZoneoutLSTM": (lambda: L.StatefulZoneoutLSTM(3, 4, 0.0, 0.0), _twice, floats(2, 3)),
    "StatelessGRU": (lambda: L.StatelessGRU(3, 4), _with_state, floats(2, 3)),
    "StatelessLSTM": (lambda: L.StatelessLSTM(3, 4), _with_two_states, floats(2, 3)),
    "StatelessMGU": (lambda: L.StatelessMGU(3, 4), _with_state, floats(2, 3)),
    "Swish": (lambda: L.Swish((3,)), None, floats(2, 3)),
}

# Links that draw random numbers; they are only run.
RANDOM = {
    "BlackOut": (lambda: L.BlackOut(4, [3, 2, 1], 2), None, floats(2, 4), integers(2)),
    "NegativeSampling": (lambda: L.NegativeSampling(4, [3, 2, 1], 2), None, floats(2, 4), integers(2)),
    "SimplifiedDropconnect": (lambda: L.SimplifiedDropconnect(3, 4), None, floats(2, 3)),
}

ELSEWHERE = {
    "TheanoFunction": "needs Theano, which does not exist for any supported Python",
    "GoogLeNet": "large; its layers are above",
    "ResNet50Layers": "large; its layers are above",
    "ResNet101Layers": "large; its layers are above",
    "ResNet152Layers": "large; its layers are above",
    "VGG16Layers": "large; its layers are above",
    "VGG19Layers": "large; its layers are above",
}


def run(name, cases, device):
    """Return the outputs and gradients of a link on a device, as arrays on the host, by name."""
    make, call, *arrays = cases[name]
    np.random.seed(3)
    with chainer.using_device("@numpy"):
        link = make()
        if any(not parameter.is_initialized for parameter in link.params()):
            (call or (lambda link, *xs: link(*xs)))(link, *arrays)
        # A new parameter's gradient is NaN, which equals NaN.
        link.cleargrads()
        for parameter in link.params():
            parameter.array[...] = np.random.uniform(-0.5, 0.5, parameter.shape)
    link.to_device(device)
    device = chainer.get_device(device)
    device.use()
    inputs = [device.send(array) for array in arrays]
    variables = [chainer.Variable(array) if array.dtype.kind == "f" else array for array in inputs]
    result = (call or (lambda link, *xs: link(*xs)))(link, *variables)
    outputs = list(_flat(result))
    total = sum(F.sum(output * output) for output in outputs)
    total.backward()
    leaves = dict(link.namedparams()) | {f"x{i}": x for i, x in enumerate(variables) if isinstance(x, chainer.Variable)}
    found = {f"y{i}": output.array for i, output in enumerate(outputs)}
    found |= {f"gradient of {at}": leaf.grad for at, leaf in leaves.items() if leaf.grad is not None}
    found |= {f"persistent {at}": getattr(child, at) for child in link.links() for at in child._persistent}
    assert all(device.is_array_supported(array) for array in found.values() if hasattr(array, "shape"))
    host = chainer.get_device("@numpy")
    return {at: host.send(array) for at, array in found.items() if hasattr(array, "shape")}


def _flat(result):
    if isinstance(result, (tuple, list)):
        for one in result:
            yield from _flat(one)
    else:
        yield result


@pytest.fixture(autouse=True)
def first_device():
    yield
    chainer.get_device("@numpy").use()


@pytest.mark.parametrize("name", CASES)
def test_device_and_host_agree(name):
    expected, found = run(name, CASES, "@numpy"), run(name, CASES, "@cupy:0")
    assert set(expected) == set(found)
    for at, array in expected.items():
        scale = max(1.0, float(np.abs(array).max()))
        assert np.isfinite(array).all(), f"{name}: {at} is not finite on the host"
        np.testing.assert_allclose(found[at], array, rtol=1e-3, atol=1e-4 * scale, err_msg=f"{name}: {at}")


@pytest.mark.parametrize("name", RANDOM)
def test_links_that_draw_random_numbers_run(name):
    assert all(np.isfinite(array).all() for array in run(name, RANDOM, "@cupy:0").values())


def test_every_link_is_here():
    names = {name for name, found in vars(L).items() if inspect.isclass(found) and issubclass(found, chainer.Link)}
    names |= {"Parameter", "TheanoFunction"}
    assert names == set(CASES) | set(RANDOM) | set(ELSEWHERE)
