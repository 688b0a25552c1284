"""CuPy 13 and 14: cuDNN is not supported, names are deprecated, and less is done for kernels that use float16.

CuPy can also be imported where there is no driver now.
"""

from mn_compat.substitution import Fix, Substitution

_CUDA = "chainer.backends.cuda"
_RESIZE_IMAGES = "chainer.functions.array.resize_images"
_NEGATIVE_SAMPLING = "chainer.functions.loss.negative_sampling"
_HIERARCHICAL_SOFTMAX = "chainer.links.loss.hierarchical_softmax"
_MULTIPROCESS_UPDATER = "chainer.training.updaters.multiprocess_parallel_updater"

# CuPy 13 defines float16 for every kernel, and has no such header.
_INCLUDE_FLOAT16 = "preamble='#if __has_include(<cupy/float16.cuh>)\\n#include <cupy/float16.cuh>\\n#endif\\n'"

FIXES = (
    Fix(
        "cudnn_warning",
        "Chainer advised to reinstall CuPy with cuDNN, which CuPy 14 no longer supports; it has its own kernels",
        (
            # The flag says whether the advice has been printed; it starts as true, unless it is set otherwise.
            Substitution(_CUDA, "'_already_warned', False)", "'_already_warned', True)"),
        ),
    ),
    Fix(
        "cudnn_tensor_core",
        "should_use_cudnn_tensor_core raised NameError where there is no cuDNN",
        (
            Substitution(_CUDA, "cudnn_enabled = False  #", "cudnn_enabled, cudnn = False, None  #"),
            Substitution(
                _CUDA,
                "cudnn.is_tensor_core_available(dtype)",
                "cudnn is not None and cudnn.is_tensor_core_available(dtype)",
            ),
        ),
    ),
    Fix(
        "cupy_loss",
        "Chainer silently fell back to the CPU if CuPy is installed but its CUDA libraries cannot be loaded",
        (
            Substitution(
                _CUDA,
                "_resolution_error = e\n\n    class ndarray",
                "_resolution_error = e\n    __import__('mn_compat.helpers.cupy_loss').helpers.cupy_loss.report(e)\n"
                "    class ndarray",
            ),
        ),
    ),
    Fix(
        "cuda_available",
        "chainer.cuda.available was True without a driver, where CuPy can be imported now, so to_gpu() failed later",
        (
            Substitution(
                _CUDA,
                "    available = True\nexcept",
                "    available = __import__('mn_compat.helpers.cuda_driver').helpers.cuda_driver.require(cuda)\nexcept",
            ),
        ),
    ),
    Fix(
        "cuda_copy",
        "chainer.cuda.copy raised without an output array: it entered a device as a context, which Chainer refuses",
        (
            Substitution(
                _CUDA,
                "with chainer.get_device(out_device):",
                "with get_device_from_array(out_device) if isinstance(out_device, ndarray)"
                " else chainer.using_device(out_device):",
            ),
        ),
    ),
    Fix(
        "scatter_add",
        "CuPy deprecates the scatter_add method of arrays, which get_item's backward pass calls",
        (
            Substitution(
                "chainer.functions.array.get_item",
                "gx.scatter_add(slices, inputs[0])",
                "chainer.backends.cuda.cupyx.scatter_add(gx, slices, inputs[0])",
            ),
        ),
    ),
    Fix(
        "nvtx_enabled",
        "CuPy deprecates nvtx_enabled, which CUDAProfileHook reads",
        (
            Substitution(
                "chainer.function_hooks.cuda_profile",
                "if not cuda.cupy.cuda.nvtx_enabled:",
                "if not getattr(cuda.cupy.cuda.nvtx, 'available', True):",
            ),
        ),
    ),
    Fix(
        "half_atomic_add",
        "CuPy 14 does not compile an atomicAdd of a float to a float16",
        (
            *(Substitution(_RESIZE_IMAGES, f"], w{corner} * gy);", f"], (T)(w{corner} * gy));") for corner in range(4)),
            Substitution(_NEGATIVE_SAMPLING, "gi * x[(i / m) * c + j]);", "(T)(gi * x[(i / m) * c + j]));"),
            Substitution(_HIERARCHICAL_SOFTMAX, "g * w[w_ind]);", "(T)(g * w[w_ind]));"),
            Substitution(_HIERARCHICAL_SOFTMAX, "g * x[x_ind]);", "(T)(g * x[x_ind]));"),
        ),
    ),
    Fix(
        "half_parameters",
        "CuPy 14 does not define float16 in MultiprocessParallelUpdater's kernels, which have no argument of that type",
        tuple(
            Substitution(_MULTIPROCESS_UPDATER, f"'_memcpy_{name}',\n", f"'_memcpy_{name}', {_INCLUDE_FLOAT16},\n")
            for name in ("gather", "scatter")
        ),
    ),
)
