"""Run the named probes, warnings as errors, and print the outcome of each as a line of JSON."""

import importlib.util
import json
import sys
import warnings

warnings.simplefilter("error")


def outcome(name):
    module = importlib.import_module(name)
    for optional in getattr(module, "NEEDS", ()):
        if importlib.util.find_spec(optional) is None:
            return "skipped", f"{optional} is not installed"
    needless = getattr(module, "needless", str)()
    try:
        module.probe()
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"
    return ("needless", needless) if needless else ("passed", "")


for name in sys.argv[1:]:
    result, detail = outcome(name)
    print(json.dumps([name, result, detail]), flush=True)
