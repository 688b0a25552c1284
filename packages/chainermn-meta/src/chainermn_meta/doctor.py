"""``chainermn doctor``, or ``python -m chainermn doctor``: the checks of :mod:`mn_tools.doctor`, and checks of Chainer.

Options, output and exit status are those of ``python -m mn_comm doctor``. In addition, it checks Chainer: which version
is installed and whether it can be imported, whether ``mn_compat`` patches it and if not why, which fixes are omitted,
which removed names of other libraries are restored, whether NumPy's scalars are promoted as Chainer expects, and which
package ``import chainermn`` imports. These checks run in a separate interpreter, like a script.

If ``CHAINERMN_IMPL=bundled`` is set, or if nothing activates ``mn_compat``, ``python -m chainermn`` runs Chainer's own
old copy, which has no doctor. ``python -m chainermn_meta doctor`` always runs this one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from chainermn_meta import chainer_probe
from mn_tools.doctor import Catalogue, Check, Options, main, ok, run_python

GROUP = "Chainer"
USAGE = "usage: chainermn {doctor,bench,timeline,elastic} [OPTIONS]\n"

_CONSTRAINT = "pip install --build-constraint constraints.txt, with the line setuptools<81 in that file"

problem = Catalogue(
    failures={
        "chainer-missing": f"install it: {_CONSTRAINT}, chainer",
        "chainer-unsupported": f"install Chainer 7.8.1: {_CONSTRAINT}, chainer==7.8.1",
        "chainer-import-fails": "{hint}",
        "mn-compat-missing": "install it: {python} -m pip install mn-compat",
        "adapter-not-started": (
            "install mn-compat into the environment (pip install --target and PYTHONPATH run no .pth files), or start "
            "scripts as: python -m mn_compat script.py"
        ),
        "adapter-skipped": "unset MN_COMPAT_SKIP: without its fixes Chainer fails or computes wrong results",
        "adapter-setting": "correct MN_COMPAT_SKIP, or unset it",
        "restore-setting": "correct MN_COMPAT_RESTORE, or unset it",
        "numpy-scalars": (
            "use Chainer with all fixes of mn-compat (the lines above say why they are not active), or NumPy 1.26"
        ),
        "chainermn-setting": "set CHAINERMN_IMPL to ours or bundled, or unset it",
        "chainermn-not-ours": "scripts get Chainer's old copy: see the lines about mn-compat above",
    },
    warnings={
        "chainer-without-gpu": "look at the message: Chainer needs CuPy with its CUDA libraries",
        "fixes-left-out": "unset MN_COMPAT_SKIP unless you need Chainer's old behaviour there",
        "chainermn-bundled": "unset CHAINERMN_IMPL to use this package: Chainer's own copy is no longer maintained",
    },
)


def run(arguments: list[str]) -> int:
    """Run the command that the first argument names, with the others; return the exit status."""
    if arguments[:1] == ["doctor"]:
        return main(arguments[1:], "chainermn", [check])
    if arguments[:1] == ["bench"]:
        from mn_tools import bench

        return bench.main(arguments[1:])
    if arguments[:1] == ["timeline"]:
        from mn_tools.timeline import command

        return command.main(arguments[1:])
    if arguments[:1] == ["elastic"]:
        from mn_elastic import supervision

        return supervision.main(arguments[1:], "chainermn")
    asked = arguments[:1] in (["-h"], ["--help"])
    (sys.stdout if asked else sys.stderr).write(USAGE)
    return 0 if asked else 2


def check(options: Options) -> Iterator[Check]:
    """Check Chainer as a script would find it."""
    outcome = run_python(chainer_probe.__name__, options.seconds)
    seen = outcome.facts()
    yield _judge_chainer(seen, outcome.described())
    yield from _judge_adapter(seen)
    if "scalars" in seen:
        yield _judge_scalars(seen)
    yield _judge_chainermn(seen)
    if seen.get("gpus") and not seen.get("cuda"):
        found = f"CuPy finds {seen['gpus']} GPUs, Chainer none: {seen.get('cuda_error') or 'no reason given'}"
        yield problem("chainer-without-gpu", GROUP, "GPU", found)


def _judge_chainer(seen: dict[str, Any], ending: str) -> Check:
    release = seen.get("release")
    if seen.get("chainer"):
        status = seen.get("status")
        if release and status and not status["supported"]:
            return problem("chainer-unsupported", GROUP, "Chainer", f"{seen['chainer']}; mn-compat patches 7.8.1 only")
        return ok(GROUP, "Chainer", f"{seen['chainer']}, {seen['folder']}")
    if seen.get("missing") == "chainer":
        return problem("chainer-missing", GROUP, "Chainer", "not installed")
    hint = "look at the lines below: without mn-compat Chainer cannot be imported here"
    if seen.get("status", {}).get("active"):
        hint = "reinstall Chainer 7.8.1 and mn-compat"
    found = f"it cannot be imported: {seen.get('chainer_error') or ending}"
    return problem("chainer-import-fails", GROUP, "Chainer", found, hint=hint)


def _judge_adapter(seen: dict[str, Any]) -> Iterator[Check]:
    status, error = seen.get("status"), str(seen.get("status_error", ""))
    if seen.get("adapter_missing"):
        yield problem("mn-compat-missing", GROUP, "mn-compat", "not installed")
    elif "MN_COMPAT_RESTORE" in error:
        found = f"MN_COMPAT_RESTORE contains unknown names: {error.rpartition(', got ')[2]!r}"
        yield problem("restore-setting", GROUP, "old names", found)
    elif not seen.get("started"):
        yield problem("adapter-not-started", GROUP, "mn-compat", "its start-up file was not run by Python")
    elif "MN_COMPAT_SKIP" in error:
        unknown = error.rpartition(", got ")[2]
        yield problem("adapter-setting", GROUP, "mn-compat", f"MN_COMPAT_SKIP contains unknown names: {unknown!r}")
    elif status and status["left_out"] and not status["active"] and status["supported"]:
        yield problem("adapter-skipped", GROUP, "mn-compat", f"not active: {status['reason']}")
    elif status and status["active"]:
        yield ok(GROUP, "mn-compat", f"active: {status['reason']}")
        if status["left_out"]:
            yield problem("fixes-left-out", GROUP, "fixes", f"MN_COMPAT_SKIP omits {', '.join(status['left_out'])}")
        else:
            yield ok(GROUP, "fixes", f"all {status['fixes']} applied")
        yield _describe_restored(status["restored"], status["restorable"])


def _describe_restored(restored: list[str], restorable: list[str]) -> Check:
    others = [name for name in restorable if name not in restored]
    found = f"restored: {', '.join(restored) or 'none'}"
    if others:
        found += f"; MN_COMPAT_RESTORE can restore {', '.join(others)} for old programs"
    return ok(GROUP, "old names", found)


def _judge_scalars(seen: dict[str, Any]) -> Check:
    if seen["scalars"]:
        found = f"wrong with NumPy {seen['numpy']}: {'; '.join(seen['scalars'])}"
        return problem("numpy-scalars", GROUP, "NumPy scalars", found)
    return ok(GROUP, "NumPy scalars", f"promoted as Chainer expects, with NumPy {seen['numpy']}")


def _judge_chainermn(seen: dict[str, Any]) -> Check:
    setting, folder = seen.get("impl", ""), seen.get("chainermn")
    if "chainermn_error" in seen:
        return problem("chainermn-setting", GROUP, "chainermn", seen["chainermn_error"])
    if seen.get("ours"):
        return ok(GROUP, "chainermn", f"ours, {folder}")
    if setting == "bundled":
        return problem("chainermn-bundled", GROUP, "chainermn", f"CHAINERMN_IMPL=bundled gives {folder}")
    return problem("chainermn-not-ours", GROUP, "chainermn", f"import chainermn gives {folder or 'nothing'}")
