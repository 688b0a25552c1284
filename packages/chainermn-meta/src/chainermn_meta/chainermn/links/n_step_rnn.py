"""``create_multi_node_n_step_rnn``, under the module name that scripts know."""

import chainermn  # noqa: F401 - scripts find it here

from mn_modelpar.links import create_multi_node_n_step_rnn as create_multi_node_n_step_rnn
