"""Linear algebra and Fourier transforms on an emulated device, beside NumPy's and SciPy's."""

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
pytest.importorskip("gpu_emulator.faults", reason="needs an environment changed by build.py")

pytestmark = pytest.mark.gpu

REAL = ["f", "d"]
ALL = [*REAL, "F", "D"]


def random(shape, dtype):
    source = np.random.RandomState(0)
    values = source.rand(*shape)
    return (values + 1j * source.rand(*shape) if dtype in "FD" else values).astype(dtype)


def positive_definite(dtype, count=4):
    a = random((count, count), dtype)
    return (a @ a.conj().T + np.eye(count)).astype(dtype)


def close(actual, expected, dtype):
    np.testing.assert_allclose(cupy.asnumpy(actual), expected, rtol=0, atol=1e-3 if dtype in "fF" else 1e-9)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("name", ["inv", "cholesky", "det", "eigvalsh", "pinv"])
@pytest.mark.parametrize("is_batch", [False, True])
def test_functions_of_one_matrix(name, dtype, is_batch):
    a = positive_definite(dtype) / 4
    a = np.stack([a, 2 * a]) if is_batch and name != "pinv" else a  # without batches of singular values
    close(getattr(cupy.linalg, name)(cupy.asarray(a)), getattr(np.linalg, name)(a), dtype)


@pytest.mark.parametrize("dtype", ALL)
def test_systems_of_equations(dtype):
    linalg = pytest.importorskip("cupyx.scipy.linalg")
    a, b = positive_definite(dtype), random((4, 2), dtype)
    on_device, right, expected = cupy.asarray(a), cupy.asarray(b), np.linalg.solve(a, b)
    close(cupy.linalg.solve(on_device, right), expected, dtype)
    close(linalg.lu_solve(linalg.lu_factor(on_device), right), expected, dtype)
    close(cupy.linalg.lstsq(on_device, right, rcond=None)[0], expected, dtype)
    lower = np.linalg.cholesky(a)
    close(linalg.solve_triangular(cupy.asarray(lower), right, lower=True), np.linalg.solve(lower, b), dtype)


@pytest.mark.parametrize("dtype", ALL)
def test_factors(dtype):
    a = random((4, 3), dtype)
    q, r = cupy.linalg.qr(cupy.asarray(a))
    close(q @ r, a, dtype)
    u, s, v = cupy.linalg.svd(cupy.asarray(a), full_matrices=False)
    close((u * s) @ v, a, dtype)
    symmetric = positive_definite(dtype)
    values, vectors = cupy.linalg.eigh(cupy.asarray(symmetric))
    close((vectors * values) @ vectors.conj().T, symmetric, dtype)


@pytest.mark.parametrize("dtype", ALL)
def test_products(dtype):
    a, b = random((3, 4, 5), dtype), random((3, 5, 2), dtype)
    close(cupy.asarray(a) @ cupy.asarray(b), a @ b, dtype)
    close(cupy.asarray(a[0]) @ cupy.asarray(b[0]), a[0] @ b[0], dtype)


@pytest.mark.parametrize("dtype", ["F", "D"])
@pytest.mark.parametrize("name", ["fft", "ifft", "fft2", "ifftn"])
def test_complex_transforms(name, dtype):
    x = random((3, 8), dtype)
    close(getattr(cupy.fft, name)(cupy.asarray(x)), getattr(np.fft, name)(x), dtype)


@pytest.mark.parametrize("dtype", REAL)
def test_real_transforms(dtype):
    y = random((3, 7), dtype)
    on_device = cupy.asarray(y)
    close(cupy.fft.rfft(on_device), np.fft.rfft(y), dtype)
    close(cupy.fft.irfft(cupy.fft.rfft(on_device), 7), y, dtype)
    close(cupy.fft.irfft2(cupy.fft.rfft2(on_device), y.shape), y, dtype)
    close(cupy.fft.fft(on_device, axis=0), np.fft.fft(y, axis=0), dtype)
