import importlib.util
import types
import warnings

nvtx = types.SimpleNamespace(available=True)
# The folder "no_driver" on the path means that this machine has no driver.
runtime = types.SimpleNamespace(driverGetVersion=lambda: 0 if importlib.util.find_spec("no_driver") else 12090)


_current = [0]


def current_device():
    return _current[-1]


class Device:
    def __init__(self, number=0):
        self.id = number

    def __enter__(self):
        _current.append(self.id)
        return self

    def __exit__(self, *exception):
        _current.pop()


class Event:
    pass


class Stream:
    pass


def __getattr__(name):
    if name == "nvtx_enabled":
        warnings.warn("cupy.cuda.nvtx_enabled has been deprecated", DeprecationWarning, stacklevel=2)
        return True
    raise AttributeError(name)
