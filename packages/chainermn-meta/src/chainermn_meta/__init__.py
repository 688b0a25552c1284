"""The folder from which ``mn_compat`` imports ``chainermn``; beside it, Chainer's own copy has that name already."""
