"""CuPy 13 and 14: cuDNN is not supported, names are deprecated, and less is done for kernels that use float16.

CuPy can also be imported where there is no driver now.
"""

from mn_compat.substitution import Fix, Substitution

_CUDA = "chainer.backends.cuda"
_RESIZE_IMAGES = "chainer.functions.array.resize_images"
_NEGATIVE_SAMPLING = "chainer.functions.loss.negative_sampling"
_HIERARCHICAL_SOFTMAX = "chainer.links.loss.hierarchical_softmax"
_MULTIPROCESS_UPDATER = "chainer.training.updaters.multiprocess_parallel_updater"

# These call cupyx.scatter_add, which warns as the method of arrays does.
_SCATTERING = (
    "chainer.functions.array.as_strided",
    "chainer.functions.array.scatter_add",
    "chainer.functions.array.spatial_transformer_sampler",
    "chainer.utils.sparse",
)

# Each fix can be omitted, so each imports the helper where it needs it.
_HELPER = "__import__('mn_compat.helpers.cuda').helpers.cuda"

_STATISTICS = "__import__('mn_compat.helpers.statistics').helpers.statistics"
_BATCH_NORMALIZATION = "chainer.functions.normalization.batch_normalization"
_BATCH_RENORMALIZATION = "chainer.functions.normalization.batch_renormalization"

# CuPy 13 defines float16 for every kernel, and has no such header.
_INCLUDE_FLOAT16 = "preamble='#if __has_include(<cupy/float16.cuh>)\\n#include <cupy/float16.cuh>\\n#endif\\n'"

FIXES = (
    Fix(
        "cudnn_warning",
        "Chainer advised to reinstall CuPy with cuDNN, which CuPy 14 no longer supports; it has its own kernels",
        # The flag says whether the advice has been printed; it starts as true, unless it is set otherwise.
        Substitution(_CUDA, "'_already_warned', False)", "'_already_warned', True)"),
    ),
    Fix(
        "cudnn_tensor_core",
        "should_use_cudnn_tensor_core raised NameError where there is no cuDNN",
        Substitution(_CUDA, "cudnn_enabled = False  #", "cudnn_enabled, cudnn = False, None  #"),
        Substitution(_CUDA, "cudnn.is_tensor_core", "cudnn is not None and cudnn.is_tensor_core"),
    ),
    Fix(
        "cudnn_missing",
        "use_cudnn='always' was silently ignored without cuDNN, and 'cudnn_fast' raised an error without a message",
        Substitution(
            _CUDA,
            "if _cudnn_version < lowest_version:\n        return False\n",
            "if _cudnn_version < lowest_version:\n"
            f"        return {_HELPER}.without_cudnn(config.use_cudnn, chainer.backends.cuda)\n",
        ),
        Substitution(
            "chainer.links.connection.convolution_2d",
            "== 'cudnn_fast'",
            f"== 'cudnn_fast' and {_HELPER}.require_cudnn(chainer.backends.cuda)",
        ),
    ),
    Fix(
        "cupy_loss",
        "Chainer silently fell back to the CPU if CuPy is installed but its CUDA libraries cannot be loaded",
        Substitution(
            _CUDA,
            "_resolution_error = e\n\n    class ndarray",
            f"_resolution_error = e\n    {_HELPER}.report_loss(e)\n    class ndarray",
        ),
    ),
    Fix(
        "cuda_available",
        "chainer.cuda.available was True without a driver, where CuPy can be imported now, so to_gpu() failed later",
        Substitution(_CUDA, "available = True\n", f"available = {_HELPER}.require_driver(cuda)\n"),
    ),
    Fix(
        "cuda_copy",
        "chainer.cuda.copy raised without an output array: it entered a device as a context, which Chainer refuses",
        Substitution(
            _CUDA,
            "with chainer.get_device(out_device):",
            "with get_device_from_array(out_device) if isinstance(out_device, ndarray)"
            " else chainer.using_device(out_device):",
        ),
    ),
    Fix(
        "scatter_add",
        "CuPy deprecates scatter_add, which gradients of get_item, as_strided, sparse_matmul and others call",
        Substitution("chainer.functions.array.get_item", "gx.scatter_add(", "chainer.backends.cuda.cupy.add.at(gx, "),
        *(Substitution(module, "cuda.cupyx.scatter_add", "cuda.cupy.add.at") for module in _SCATTERING),
    ),
    Fix(
        "nvtx_enabled",
        "CuPy deprecates nvtx_enabled, which CUDAProfileHook reads",
        Substitution(
            "chainer.function_hooks.cuda_profile",
            "if not cuda.cupy.cuda.nvtx_enabled:",
            "if not getattr(cuda.cupy.cuda.nvtx, 'available', True):",
        ),
    ),
    Fix(
        "half_atomic_add",
        "CuPy 14 does not compile an atomicAdd of a float to a float16",
        *(Substitution(_RESIZE_IMAGES, f"], w{corner} * gy);", f"], (T)(w{corner} * gy));") for corner in range(4)),
        Substitution(_NEGATIVE_SAMPLING, "gi * x[(i / m) * c + j]);", "(T)(gi * x[(i / m) * c + j]));"),
        Substitution(_HIERARCHICAL_SOFTMAX, "g * w[w_ind]);", "(T)(g * w[w_ind]));"),
        Substitution(_HIERARCHICAL_SOFTMAX, "g * x[x_ind]);", "(T)(g * x[x_ind]));"),
    ),
    Fix(
        "half_parameters",
        "CuPy 14 does not define float16 in MultiprocessParallelUpdater's kernels, which have no argument of that type",
        *(
            Substitution(_MULTIPROCESS_UPDATER, f"'_memcpy_{name}',\n", f"'_memcpy_{name}', {_INCLUDE_FLOAT16},\n")
            for name in ("gather", "scatter")
        ),
    ),
    Fix(
        "batch_statistics",
        "without cuDNN, computing variances for batch normalization took most of the time of training on a GPU",
        *(
            Substitution(module, f"x.{name}(axis=axis, dtype={dtype})", f"{_STATISTICS}.{name}(x, axis, {dtype})")
            for module, dtype in ((_BATCH_NORMALIZATION, "interm_dtype"), (_BATCH_RENORMALIZATION, "gamma.dtype"))
            for name in ("mean", "var")
        ),
        *(
            Substitution(
                _BATCH_NORMALIZATION,
                f"{array}.sum(axis=axis, dtype=gamma.dtype)\n",
                f"{_STATISTICS}.total({array}, axis, gamma.dtype)\n",
            )
            for array in ("gy", "(gy * x_hat)")
        ),
    ),
)
