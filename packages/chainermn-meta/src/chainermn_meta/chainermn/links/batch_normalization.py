"""``MultiNodeBatchNormalization``, under the module name that scripts know."""

from mn_modelpar.links import MultiNodeBatchNormalization as MultiNodeBatchNormalization
