"""The networks that train_imagenet.py can train; each has ``insize``, and returns the loss of pictures and classes."""

import chainer
import chainer.functions as F
import chainer.links as L


class Network(chainer.Chain):
    """Reports the loss and the accuracy of the scores that a derived class computes."""

    def forward(self, x, t):
        """Return the loss."""
        return self.loss(self.scores(x), t)

    def loss(self, scores, t):
        """Return the loss of scores, and report it."""
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


class GoogLeNet(Network):
    """GoogLeNet (Szegedy and others, 2014: Going deeper with convolutions, table 1), with its two side classifiers.

    During training, 0.3 times the loss of each side classifier is added to the reported loss, which is that of the main
    classifier; otherwise they are not computed.
    """

    insize = 224

    def __init__(self, n_classes=1000):
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(None, 64, 7, stride=2, pad=3)
            self.conv2_reduce = L.Convolution2D(None, 64, 1)
            self.conv2 = L.Convolution2D(None, 192, 3, pad=1)
            self.inc3a = L.Inception(None, 64, 96, 128, 16, 32, 32)
            self.inc3b = L.Inception(None, 128, 128, 192, 32, 96, 64)
            self.inc4a = L.Inception(None, 192, 96, 208, 16, 48, 64)
            self.inc4b = L.Inception(None, 160, 112, 224, 24, 64, 64)
            self.inc4c = L.Inception(None, 128, 128, 256, 24, 64, 64)
            self.inc4d = L.Inception(None, 112, 144, 288, 32, 64, 64)
            self.inc4e = L.Inception(None, 256, 160, 320, 32, 128, 128)
            self.inc5a = L.Inception(None, 256, 160, 320, 32, 128, 128)
            self.inc5b = L.Inception(None, 384, 192, 384, 48, 128, 128)
            self.fc = L.Linear(None, n_classes)
            self.side4a = SideClassifier(n_classes)
            self.side4d = SideClassifier(n_classes)

    def forward(self, x, t):
        """Return the loss; during training, with the shares of the side classifiers."""
        scores, after4a, after4d = self.trunk(x)
        loss = self.loss(scores, t)
        if chainer.config.train:
            loss += 0.3 * F.softmax_cross_entropy(self.side4a(after4a), t)
            loss += 0.3 * F.softmax_cross_entropy(self.side4d(after4d), t)
        return loss

    def trunk(self, x):
        """Return the scores of each class, and the inputs of the side classifiers."""
        x = F.local_response_normalization(halved(F.relu(self.conv1(x))))
        x = F.relu(self.conv2(F.relu(self.conv2_reduce(x))))
        x = self.inc3b(self.inc3a(halved(F.local_response_normalization(x))))
        after4a = self.inc4a(halved(x))
        after4d = self.inc4d(self.inc4c(self.inc4b(after4a)))
        x = self.inc5b(self.inc5a(halved(self.inc4e(after4d))))
        return self.fc(F.dropout(F.average(x, axis=(2, 3)), 0.4)), after4a, after4d


class SideClassifier(chainer.Chain):
    """A classifier beside GoogLeNet's trunk, which makes its lower layers learn faster (section 5 of the paper)."""

    def __init__(self, n_classes):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(None, 128, 1)
            self.hidden = L.Linear(None, 1024)
            self.fc = L.Linear(None, n_classes)

    def forward(self, x):
        """Return the scores of each class."""
        x = F.relu(self.conv(F.average_pooling_2d(x, 5, stride=3)))
        return self.fc(F.dropout(F.relu(self.hidden(x)), 0.7))


class GoogLeNetBN(Network):
    """GoogLeNet with batch normalisation (Ioffe and Szegedy, 2015: Batch normalization, figure 5), whose trunk it is.

    Where the figure's sums do not give the channels that it names, in 4c and 4d, the pooled path is the narrower one.
    """

    insize = 224

    def __init__(self, n_classes=1000):
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(None, 64, 7, stride=2, pad=3, nobias=True)
            self.norm1 = L.BatchNormalization(64)
            self.conv2_reduce = L.Convolution2D(None, 64, 1, nobias=True)
            self.norm2_reduce = L.BatchNormalization(64)
            self.conv2 = L.Convolution2D(None, 192, 3, pad=1, nobias=True)
            self.norm2 = L.BatchNormalization(192)
            self.modules = chainer.Sequential(
                L.InceptionBN(None, 64, 64, 64, 64, 96, "avg", 32),
                L.InceptionBN(None, 64, 64, 96, 64, 96, "avg", 64),
                L.InceptionBN(None, 0, 128, 160, 64, 96, "max", stride=2),
                L.InceptionBN(None, 224, 64, 96, 96, 128, "avg", 128),
                L.InceptionBN(None, 192, 96, 128, 96, 128, "avg", 128),
                L.InceptionBN(None, 160, 128, 160, 128, 160, "avg", 96),
                L.InceptionBN(None, 96, 128, 192, 160, 192, "avg", 96),
                L.InceptionBN(None, 0, 128, 192, 192, 256, "max", stride=2),
                L.InceptionBN(None, 352, 192, 320, 160, 224, "avg", 128),
                L.InceptionBN(None, 352, 192, 320, 192, 224, "max", 128),
            )
            self.fc = L.Linear(None, n_classes)

    def scores(self, x):
        """Return the scores of each class."""
        x = halved(F.relu(self.norm1(self.conv1(x))))
        x = F.relu(self.norm2_reduce(self.conv2_reduce(x)))
        x = halved(F.relu(self.norm2(self.conv2(x))))
        return self.fc(F.average(self.modules(x), axis=(2, 3)))


def halved(x):
    """Return the largest values of overlapping windows: half as many in each direction."""
    return F.max_pooling_2d(x, 3, stride=2)


class ResNet50(Network):
    """ResNet-50 (He and others, 2015) as in Chainer, without the weights."""

    insize = 224

    def __init__(self, n_classes=1000):
        super().__init__()
        with self.init_scope():
            self.base = L.ResNet50Layers(pretrained_model=None)
        # It contains the weights of 1,000 classes.
        del self.base.fc6
        with self.base.init_scope():
            self.base.fc6 = L.Linear(None, n_classes)

    def scores(self, x):
        """Return the scores of each class."""
        return self.base(x, layers=["fc6"])["fc6"]


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


ARCHITECTURES = {
    "alex": Alex,
    "googlenet": GoogLeNet,
    "googlenetbn": GoogLeNetBN,
    "nin": NIN,
    "resnet50": ResNet50,
    "tiny": Tiny,
}
