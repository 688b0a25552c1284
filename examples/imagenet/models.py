"""The networks that train_imagenet.py can train; each has ``insize``, and returns the loss of pictures and classes."""

import chainer
import chainer.functions as F
import chainer.links as L


class Network(chainer.Chain):
    """Reports the loss and the accuracy of the scores that a derived class computes."""

    def forward(self, x, t):
        """Return the loss."""
        scores = self.scores(x)
        loss = F.softmax_cross_entropy(scores, t)
        chainer.report({"loss": loss, "accuracy": F.accuracy(scores, t)}, self)
        return loss


class Alex(Network):
    """AlexNet, in one column (Krizhevsky, 2014: One weird trick)."""

    insize = 227

    def __init__(self, n_classes=1000):
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(None, 96, 11, stride=4)
            self.conv2 = L.Convolution2D(None, 256, 5, pad=2)
            self.conv3 = L.Convolution2D(None, 384, 3, pad=1)
            self.conv4 = L.Convolution2D(None, 384, 3, pad=1)
            self.conv5 = L.Convolution2D(None, 256, 3, pad=1)
            self.fc6 = L.Linear(None, 4096)
            self.fc7 = L.Linear(None, 4096)
            self.fc8 = L.Linear(None, n_classes)

    def scores(self, x):
        """Return the scores of each class."""
        for conv in (self.conv1, self.conv2):
            x = F.max_pooling_2d(F.local_response_normalization(F.relu(conv(x))), 3, stride=2)
        x = F.relu(self.conv4(F.relu(self.conv3(x))))
        x = F.max_pooling_2d(F.relu(self.conv5(x)), 3, stride=2)
        x = F.dropout(F.relu(self.fc7(F.dropout(F.relu(self.fc6(x))))))
        return self.fc8(x)


class NIN(Network):
    """Network in network (Lin, Chen and Yan, 2013)."""

    insize = 227

    def __init__(self, n_classes=1000):
        super().__init__()
        with self.init_scope():
            self.mlp1 = L.MLPConvolution2D(None, (96, 96, 96), 11, stride=4)
            self.mlp2 = L.MLPConvolution2D(None, (256, 256, 256), 5, pad=2)
            self.mlp3 = L.MLPConvolution2D(None, (384, 384, 384), 3, pad=1)
            self.mlp4 = L.MLPConvolution2D(None, (1024, 1024, n_classes), 3, pad=1)

    def scores(self, x):
        """Return the scores of each class."""
        for mlp in (self.mlp1, self.mlp2, self.mlp3):
            x = F.max_pooling_2d(F.relu(mlp(x)), 3, stride=2)
        x = self.mlp4(F.dropout(x))
        return F.reshape(F.average_pooling_2d(x, x.shape[2:]), (len(x), -1))


class ResNet50(Network):
    """ResNet-50 (He and others, 2015), as it is in Chainer, without the weights."""

    insize = 224

    def __init__(self, n_classes=1000):
        super().__init__()
        with self.init_scope():
            self.base = L.ResNet50Layers(pretrained_model=None)
            self.fc = L.Linear(None, n_classes)
        del self.base.fc6

    def scores(self, x):
        """Return the scores of each class."""
        return self.fc(self.base(x, layers=["pool5"])["pool5"])


class Tiny(Network):
    """Three convolutions, for small pictures and impatient people."""

    insize = 64

    def __init__(self, n_classes=1000):
        super().__init__()
        with self.init_scope():
            self.convs = chainer.ChainList(*(L.Convolution2D(None, n, 5, stride=2, pad=2) for n in (16, 32, 64)))
            self.norms = chainer.ChainList(*(L.BatchNormalization(n) for n in (16, 32, 64)))
            self.fc = L.Linear(None, n_classes)

    def scores(self, x):
        """Return the scores of each class."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return self.fc(x)


ARCHITECTURES = {"alex": Alex, "nin": NIN, "resnet50": ResNet50, "tiny": Tiny}
