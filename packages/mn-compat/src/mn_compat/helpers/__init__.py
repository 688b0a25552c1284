"""Helpers that the substituted code in Chainer's modules calls."""
