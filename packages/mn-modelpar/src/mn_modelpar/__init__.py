"""Models that span processes: to be filled with differentiable communication, chain lists and batch normalisation."""

import mn_compat  # noqa: F401 - first: it makes Chainer importable

__all__: list[str] = []
