"""Batch normalisation over all ranks, under the module name that scripts know."""

from mn_modelpar.functions.batch_normalization import MultiNodeBatchNormalizationFunction

__all__ = ["MultiNodeBatchNormalizationFunction"]
