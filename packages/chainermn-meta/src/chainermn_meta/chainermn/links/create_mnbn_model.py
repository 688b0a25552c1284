"""``create_mnbn_model``, under the module name that scripts know."""

import chainermn  # noqa: F401 - scripts find it here

from mn_modelpar.links import create_mnbn_model as create_mnbn_model
