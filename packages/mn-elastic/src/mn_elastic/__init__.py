"""Jobs that go on after a failure; independent of Chainer. ``supervision``: the command ``chainermn elastic``."""
