SYMPTOM = "Descriptors cannot be created directly|has no attribute"


def probe():
    import os
    import tempfile

    import numpy
    from chainer.links.caffe import CaffeFunction
    from chainer.links.caffe.protobuf3 import caffe_pb2

    assert caffe_pb2.V1LayerParameter.CONVOLUTION == 4
    assert (caffe_pb2.TRAIN, caffe_pb2.Phase.Name(caffe_pb2.TEST)) == (0, "TEST")
    assert caffe_pb2.BlobProto.DESCRIPTOR.fields_by_name["data"].GetOptions().packed

    net = caffe_pb2.NetParameter()
    layer = net.layer.add(name="l1", type="InnerProduct", bottom=["x"], top=["y"])
    layer.inner_product_param.num_output = 2
    weights = layer.blobs.add(data=[1, 2, 3, 4, 5, 6])
    weights.shape.dim.extend([2, 3])
    layer.blobs.add(data=[10, 20]).shape.dim.append(2)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "net.caffemodel")
        with open(path, "wb") as file:
            file.write(net.SerializeToString())
        function = CaffeFunction(path)
    (y,) = function(inputs={"x": numpy.ones((1, 3), numpy.float32)}, outputs=["y"])
    assert y.array.tolist() == [[16, 35]], y.array
