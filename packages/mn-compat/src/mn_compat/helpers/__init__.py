"""What substituted text in Chainer's modules calls, where one line does not say it all."""
