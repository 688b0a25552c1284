"""A generator of pictures, and a discriminator that tells them from real ones (Radford, Metz and Chintala, 2015)."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np


class Generator(chainer.Chain):
    """Makes pictures of 32 by 32 pixels out of noise."""

    def __init__(self, n_hidden, channels=3, width=256, wscale=0.02):
        super().__init__()
        self.n_hidden = n_hidden
        self.width = width
        w = chainer.initializers.Normal(wscale)
        with self.init_scope():
            self.l0 = L.Linear(n_hidden, 4 * 4 * width, initialW=w)
            self.dc1 = L.Deconvolution2D(width, width // 2, 4, 2, 1, initialW=w)
            self.dc2 = L.Deconvolution2D(width // 2, width // 4, 4, 2, 1, initialW=w)
            self.dc3 = L.Deconvolution2D(width // 4, channels, 4, 2, 1, initialW=w)
            self.bn0 = L.BatchNormalization(4 * 4 * width)
            self.bn1 = L.BatchNormalization(width // 2)
            self.bn2 = L.BatchNormalization(width // 4)

    def make_hidden(self, batchsize):
        """Return noise of shape (batchsize, n_hidden, 1, 1) between -1 and 1."""
        return np.random.uniform(-1, 1, (batchsize, self.n_hidden, 1, 1)).astype(np.float32)

    def forward(self, z):
        """Return pictures of shape (batchsize, channels, 32, 32) between 0 and 1."""
        h = F.reshape(F.relu(self.bn0(self.l0(z))), (len(z), self.width, 4, 4))
        h = F.relu(self.bn1(self.dc1(h)))
        h = F.relu(self.bn2(self.dc2(h)))
        return F.sigmoid(self.dc3(h))


class Discriminator(chainer.Chain):
    """Scores pictures: the higher, the more real."""

    def __init__(self, width=256, wscale=0.02):
        super().__init__()
        w = chainer.initializers.Normal(wscale)
        with self.init_scope():
            self.c0 = L.Convolution2D(None, width // 4, 4, 2, 1, initialW=w)
            self.c1 = L.Convolution2D(width // 4, width // 2, 4, 2, 1, initialW=w)
            self.c2 = L.Convolution2D(width // 2, width, 4, 2, 1, initialW=w)
            self.out = L.Linear(None, 1, initialW=w)
            self.bn1 = L.BatchNormalization(width // 2)
            self.bn2 = L.BatchNormalization(width)

    def forward(self, x):
        """Return a score for each picture, of shape (batchsize, 1)."""
        h = F.leaky_relu(self.c0(x))
        h = F.leaky_relu(self.bn1(self.c1(h)))
        h = F.leaky_relu(self.bn2(self.c2(h)))
        return self.out(h)
