NEEDS = ("h5py",)
SYMPTOM = "b'"


def probe():
    import os
    import tempfile

    import h5py
    from chainer.serializers import HDF5Deserializer

    with tempfile.TemporaryDirectory() as folder, h5py.File(os.path.join(folder, "x.h5"), "w") as file:
        file["text"] = "größer"
        file["fixed"] = b"abc"
        file["number"] = 1.5
        read = HDF5Deserializer(file)
        assert read("text", "") == "größer", read("text", "")
        assert read("fixed", "") == "abc", read("fixed", "")
        assert read("number", 0.0) == 1.5
        assert read("number", 0) == 1
