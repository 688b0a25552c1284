"""One step of both networks."""

import chainer
import chainer.functions as F


class DCGANUpdater(chainer.training.updaters.StandardUpdater):
    """Updates the discriminator and the generator by turns; each optimizer averages gradients over the processes."""

    def __init__(self, *, models, **kwargs):
        self.gen, self.dis = models
        super().__init__(**kwargs)

    def update_core(self):
        """Take one step of each."""
        real = chainer.Variable(self.converter(self.get_iterator("main").next(), self.device))
        noise = chainer.Variable(self.device.send(self.gen.make_hidden(len(real))))
        made = self.gen(noise)
        score_real, score_made = self.dis(real), self.dis(made)
        self.get_optimizer("dis").update(self.loss_dis, score_real, score_made)
        self.get_optimizer("gen").update(self.loss_gen, score_made)

    def loss_dis(self, score_real, score_made):
        """Return how badly the discriminator tells them apart."""
        loss = F.mean(F.softplus(-score_real)) + F.mean(F.softplus(score_made))
        chainer.report({"loss": loss}, self.dis)
        return loss

    def loss_gen(self, score_made):
        """Return how badly the generator deceives it."""
        loss = F.mean(F.softplus(-score_made))
        chainer.report({"loss": loss}, self.gen)
        return loss
