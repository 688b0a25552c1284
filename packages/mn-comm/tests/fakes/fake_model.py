"""The least that counts as a model: what ``mn_comm`` asks of one."""


class Param:
    def __init__(self, data, grad=None):
        self.data = data
        self.grad = grad


class Model:
    def __init__(self, **params):
        self.params = params

    def namedparams(self):
        return iter([("/" + name, param) for name, param in self.params.items()])
