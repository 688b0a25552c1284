"""Multi-node optimizers, and optimizers and schedules for large batches."""

from mn_optim import (  # noqa: F401 - __all__ contains what is imported here
    LAMB,
    SLOW_START,
    AfterBackward,
    Asynchronous,
    DiLoCo,
    DuringBackward,
    LocalSGD,
    MultiNodeOptimizer,
    OneStepLate,
    RMSpropWarmup,
    Sharded,
    StreamingDiLoCo,
    SynchronousFirst,
    create_multi_node_optimizer,
    gradual_warmup,
    keep_last_statistics,
    linear_scaling,
    piecewise,
    sgd_share,
)
from mn_optim import MultiNodeOptimizer as _MultiNodeOptimizer  # noqa: F401

__all__ = [name for name in dir() if not name.startswith("__")]
