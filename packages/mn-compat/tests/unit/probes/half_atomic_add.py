SYMPTOM = "not cast"


def sources():
    from chainer.functions.array import resize_images
    from chainer.functions.loss import negative_sampling
    from chainer.links.loss import hierarchical_softmax

    for module in (resize_images, negative_sampling, hierarchical_softmax):
        yield module.__name__, module.__loader__.get_source(module.__name__)


def probe():
    import re

    # Runs only on a device; CUDA requires that a computed addend is cast to the array's type.
    total = 0
    for name, source in sources():
        for addend in re.findall(r"atomicAdd\(&\w+\[.+?\], (.+)\);", source):
            total += 1
            assert addend.startswith("(T)("), f"{name}: {addend} is not cast"
    assert total == 7, total
