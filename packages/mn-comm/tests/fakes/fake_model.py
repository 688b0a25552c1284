"""The smallest object that ``mn_comm`` accepts as a model."""


class Param:
    def __init__(self, data, grad=None):
        self.data = data
        self.grad = grad


class Model:
    def __init__(self, **params):
        self.params = params

    def namedparams(self):
        return iter([("/" + name, param) for name, param in self.params.items()])
