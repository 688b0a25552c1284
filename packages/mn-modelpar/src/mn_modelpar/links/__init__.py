"""Links that span ranks."""

from mn_modelpar.links.batch_normalization import MultiNodeBatchNormalization
from mn_modelpar.links.chain_list import MultiNodeChainList
from mn_modelpar.links.create_mnbn_model import create_mnbn_model
from mn_modelpar.links.n_step_rnn import create_multi_node_n_step_rnn

__all__ = ["MultiNodeBatchNormalization", "MultiNodeChainList", "create_mnbn_model", "create_multi_node_n_step_rnn"]
