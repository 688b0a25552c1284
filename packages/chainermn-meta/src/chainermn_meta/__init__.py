"""Where ``mn_compat`` finds ``chainermn``, which cannot lie beside Chainer's own copy of that name."""
