SYMPTOM = "'NoneType' object has no attribute 'finalize'"


def probe():
    import chainer
    from chainer.training import extensions

    finalized = []

    class Iterator(chainer.dataset.Iterator):
        def finalize(self):
            finalized.append(self)

    real = Iterator()
    evaluator = extensions.Evaluator({"main": None, "other": real}, chainer.links.Linear(1, 1))
    evaluator.finalize()
    assert finalized == [real], finalized
