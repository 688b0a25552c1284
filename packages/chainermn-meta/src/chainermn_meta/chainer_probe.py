"""Imports Chainer as a script would, tries it out, and writes the results; runs in its own process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from mn_tools.doctor import emit, errors_as


def main() -> None:
    """Write the results, each step as soon as it is done, because any step may end the process."""
    warnings.simplefilter("ignore")
    # Before any of these packages could install the finder.
    started = any(type(finder).__module__ in ("_mn_compat_startup", "mn_compat.finder") for finder in sys.meta_path)
    emit(started=started, impl=os.environ.get("CHAINERMN_IMPL", ""))
    _find_chainermn()
    chainer = _import_chainer()
    _ask_adapter()
    if chainer is not None:
        _try_scalars(chainer)
        _look_for_gpus(chainer)


def _find_chainermn() -> None:
    try:
        spec = importlib.util.find_spec("chainermn")
    except ImportError as error:
        if "CHAINERMN_IMPL" in str(error):
            emit(chainermn_error=str(error))
        return
    folder = os.path.dirname(spec.origin or "") if spec else ""
    emit(chainermn=folder, ours=os.path.basename(os.path.dirname(folder)) == "chainermn_meta")


def _import_chainer() -> Any:
    chainer: Any = None
    with errors_as("chainer_error"):
        chainer = importlib.import_module("chainer")
        emit(chainer=str(chainer.__version__), folder=os.path.dirname(chainer.__file__))
    return chainer


def _ask_adapter() -> None:
    if importlib.util.find_spec("mn_compat") is None:
        emit(adapter_missing=True)
        return
    with errors_as("status_error"):
        import mn_compat
        from mn_compat.fixes import FIXES
        from mn_compat.release import find_release
        from mn_compat.restorations import RESTORATIONS

        status, release = mn_compat.status(), find_release()
        about = {
            "active": status.active,
            "reason": status.reason,
            "left_out": status.left_out,
            "supported": release is not None and release.supported,
            "fixes": len(FIXES),
            "restored": status.restored,
            "restorable": [restoration.name for restoration in RESTORATIONS],
        }
        emit(release=status.chainer_version, status=about)


def _try_scalars(chainer: Any) -> None:
    import numpy

    wrong = []
    for what, attempt in ATTEMPTS.items():
        try:
            if not attempt(chainer, numpy):
                wrong.append(what)
        except Exception as error:
            wrong.append(f"{what} ({type(error).__name__})")
    emit(scalars=wrong, numpy=numpy.__version__)


def _mean_is_exact(chainer: Any, numpy: Any) -> bool:
    summary = chainer.Summary()
    for _ in range(2000):
        summary.add(numpy.float16(1.2))
    return abs(float(summary.compute_mean()) - 1.2) < 1e-3


def _state_stays_single(chainer: Any, numpy: Any) -> bool:
    with chainer.using_config("dtype", numpy.float32):
        link = chainer.links.Linear(2, 1)
    optimizer = chainer.optimizers.SMORMS3(eps=numpy.float64(1e-16)).setup(link)
    for parameter in link.params():
        parameter.grad = numpy.ones_like(parameter.data)
    optimizer.update()
    return all(value.dtype == numpy.float32 for value in link.W.update_rule.state.values())


def _unsigned_is_padded(chainer: Any, numpy: Any) -> bool:
    rows = [numpy.ones(1, numpy.uint8), numpy.ones(2, numpy.uint8)]
    return bool(chainer.functions.pad_sequence(rows, padding=-1).data.tolist() == [[1, 255], [1, 1]])


ATTEMPTS: dict[str, Callable[[Any, Any], bool]] = {
    "averages in a LogReport lose precision": _mean_is_exact,
    "an optimizer's state becomes float64": _state_stays_single,
    "padding unsigned integers raises": _unsigned_is_padded,
}


def _look_for_gpus(chainer: Any) -> None:
    cuda = chainer.backends.cuda
    gpus = 0
    with contextlib.suppress(Exception):
        import cupy

        gpus = int(cupy.cuda.runtime.getDeviceCount())
    emit(gpus=gpus, cuda=bool(cuda.available), cuda_error=str(getattr(cuda, "_resolution_error", None) or ""))


if __name__ == "__main__":
    main()
