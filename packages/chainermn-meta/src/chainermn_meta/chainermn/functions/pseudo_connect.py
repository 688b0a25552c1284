"""``pseudo_connect``, under the module name that scripts know."""

from mn_modelpar.functions import pseudo_connect as pseudo_connect
