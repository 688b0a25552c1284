"""Generated protobuf code."""

from mn_compat.substitution import Fix, Substitution

_CAFFE = "chainer.links.caffe.protobuf3.caffe_pb2"

FIXES = (
    Fix(
        "caffe_protobuf",
        "protobuf 4 and later refuse descriptors built piece by piece by old generated code",
        # The module embeds the whole serialized description. Current versions of protobuf build everything from it,
        # so the 5,500 lines that follow are turned into a string that is not used.
        Substitution(
            _CAFFE,
            "from google.protobuf import reflection as _reflection",
            "from google.protobuf import descriptor_pool as _descriptor_pool",
        ),
        Substitution(
            _CAFFE,
            "from google.protobuf import symbol_database as _symbol_database",
            "from google.protobuf.internal import builder as _builder",
        ),
        Substitution(_CAFFE, "_sym_db = _symbol_database.Default()", ""),
        Substitution(
            _CAFFE,
            "_descriptor.FileDescriptor(\n  name='caffe.proto',\n  package='caffe',\n"
            "  syntax='proto2',\n  serialized_pb=",
            "_descriptor_pool.Default().AddSerializedFile(\n\n\n\n  ",
        ),
        Substitution(
            _CAFFE,
            "_sym_db.RegisterFileDescriptor(DESCRIPTOR)\n\n",
            '_builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())\nr"""\n',
        ),
        Substitution(
            _CAFFE,
            "# @@protoc_insertion_point(module_scope)",
            '""";_builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, "caffe_pb2", globals())',
        ),
    ),
)
