import io
import os
import pickle
import zipfile

import chainer
import numpy as np
import pytest
from chainer.serializers import npz
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from numpy.lib import format as npy

import mn_extensions  # noqa: F401 - before Chainer
from mn_extensions.checkpoint.arrays import _is_pickled_none as is_pickled_none
from mn_extensions.checkpoint.arrays import is_marked, read_arrays, write_arrays
from mn_extensions.checkpoint.files import (
    FileRecord,
    HashingWriter,
    check_writable,
    open_regular,
    read_record,
    write_file,
)
from mn_extensions.checkpoint.manifest import (
    Manifest,
    file_name,
    iterations_of,
    manifest_name,
    read_manifest,
    temporaries_of,
    write_manifest,
)
from mn_extensions.checkpoint.state import check_fits, load_state, state_of

DTYPES = st.sampled_from(["f2", "f4", ">f8", "i1", "u8", "?", "c8", "U3"])
ARRAYS = DTYPES.flatmap(lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, min_side=0)))


def written(arrays):
    file = io.BytesIO()
    write_arrays(file, arrays)
    return file.getvalue()


@given(st.dictionaries(st.text("abc/:", min_size=1), ARRAYS))
def test_arrays_come_back_as_they_were(arrays):
    back = read_arrays(io.BytesIO(written(arrays)))
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array)


def test_none_comes_back_without_unpickling():
    content = written({"x": np.asarray(None), "y": np.arange(3)})
    assert read_arrays(io.BytesIO(content))["x"].item() is None
    model = chainer.links.Linear(None, 3)
    chainer.serializers.load_npz(io.BytesIO(written(npz.serialize(model))), model)  # Chainer reads it too
    assert model.W.data is None


class Trap:
    def __reduce__(self):
        return os.system, ("echo trapped >&2",)


def saved(array):
    file = io.BytesIO()
    np.savez_compressed(file, x=array)
    file.seek(0)
    return file


def alone(value):
    array = np.empty((), object)
    array[()] = value
    return array


def test_python_objects_are_not_written():
    with pytest.raises(TypeError, match="expected arrays without Python objects in a snapshot, got dtype object in x"):
        written({"x": np.asarray({"a": 1})})


@pytest.mark.parametrize(
    "array",
    [
        *map(alone, (Trap(), 0, "None", [None], (None,), {}, b"b")),
        np.array([Trap()]),
        np.array([None]),
        np.array([[None]]),
        np.array((None,), [("x", object)]),
    ],
    ids=repr,
)
def test_python_objects_are_not_read(array, capfd):
    with pytest.raises(ValueError, match=r"without Python objects, got dtype .*(object|'O').* in x\.npy"):
        read_arrays(saved(array))
    assert "trapped" not in capfd.readouterr().err


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("pickler", [pickle.dumps, pickle._dumps])
def test_none_of_any_python_is_none(protocol, pickler):
    pickled = pickler(np.asarray(None), protocol)
    assert is_pickled_none(pickled)
    for other in (pickler(alone(0), protocol), pickler([None], protocol), pickler(None, protocol), pickled[:-1], b""):
        assert not is_pickled_none(other)
    assert not is_pickled_none(pickled.replace(b"ndarray", b"os.kill"))


@pytest.mark.parametrize("protocol", [2, 3])  # those that NumPy 1 wrote; there, the name's length is not in the pickle
def test_none_of_any_numpy_is_none(protocol):
    pickled = pickle.dumps(np.asarray(None), protocol)
    plain = pickled.replace(b"numpy._core.", b"numpy.core.")
    assert is_pickled_none(plain)
    assert is_pickled_none(plain.replace(b"numpy.core.", b"numpy._core."))


@given(st.integers(0, 10_000), st.integers(0, 7), st.booleans())
def test_a_damaged_file_is_a_value_error_or_what_it_was(position, bit, is_cut):
    content = bytearray(OF_A_MODEL)
    position %= len(content)
    if is_cut:
        del content[position:]
    else:
        content[position] ^= 1 << bit
    try:
        arrays = read_arrays(io.BytesIO(content))
    except ValueError:
        return
    assert not is_cut
    for name, array in read_arrays(io.BytesIO(OF_A_MODEL)).items():  # the flipped bit was in a date, say
        if name in arrays:
            np.testing.assert_array_equal(arrays[name], array)


def test_a_member_that_seems_encrypted():
    content = bytearray(OF_A_MODEL)
    content[content.index(b"PK\1\2") + 8] |= 1
    with pytest.raises(ValueError, match="encrypted"):
        read_arrays(io.BytesIO(content))


def with_header(header, **options):
    """Return an archive of one member of 48 bytes."""
    file = io.BytesIO()
    npy.write_array(file, np.zeros(12, "f4"))
    content = file.getvalue()
    changed = header.encode().ljust(len(content) - 48 - 11) + b"\n"
    archived = io.BytesIO()
    with zipfile.ZipFile(archived, "w", **options) as archive:
        archive.writestr("x.npy", content[:10] + changed + content[-48:])
    archived.seek(0)
    return archived


@pytest.mark.parametrize("shape", [f"({2**40}, 9)", f"({2**70},)", "(True, 12)", "(13,)", "(3,)", "(-1, 12)"])
def test_a_shape_that_does_not_fit_is_found_before_memory_is_allocated(shape):
    right = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }"
    assert read_arrays(with_header(right))["x"].shape == (3, 4)
    with pytest.raises(ValueError, match=r"expected -?\d+ bytes for shape \(.* and dtype float32 in x\.npy, got 48"):
        read_arrays(with_header(right.replace("(3, 4)", shape)))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compression_that_numpy_does_not_use(method):
    with pytest.raises(ValueError, match="no compression, or that of NumPy, got number"):
        read_arrays(with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }", compression=method))


def of_a_model():
    file = io.BytesIO()
    chainer.serializers.save_npz(file, chainer.Sequential(chainer.links.Linear(None, 3), chainer.links.Linear(4, 5)))
    return file.getvalue()


OF_A_MODEL = of_a_model()


def test_files_written_here_are_marked_and_others_are_not(tmp_path):
    (tmp_path / "ours").write_bytes(written({"x": np.arange(3)}))
    (tmp_path / "old").write_bytes(OF_A_MODEL)
    (tmp_path / "empty").touch()
    assert [is_marked(tmp_path / name) for name in ("ours", "old", "empty")] == [True, False, False]
    with pytest.raises(FileNotFoundError):
        is_marked(tmp_path / "missing")


@pytest.mark.parametrize("content", [b"", b"PK", b"no zip file at all" * 10])
def test_another_file(content):
    with pytest.raises(ValueError, match=r"expected an \.npz file"):
        read_arrays(io.BytesIO(content))


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    record = write_file(tmp_path, "a", lambda file: file.write(b"first"))
    assert record == read_record(tmp_path, "a")
    assert record.nbytes == 5

    def fail(file):
        file.write(b"sec")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path, "a", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"first"


def test_what_is_written_in_parts_is_hashed_as_a_whole(tmp_path):
    def fill(file):
        assert isinstance(file, HashingWriter)
        for part in (b"ab", memoryview(np.arange(5.0)), b""):
            file.write(part)

    assert write_file(tmp_path, "a", fill) == read_record(tmp_path, "a")


def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    look = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **options: look(tmp_path / "file"))
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "pipe")


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        check_writable(tmp_path / "file")
    check_writable(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []


@pytest.mark.parametrize("run", ["run", "a.b", "a.0", "a.0.1", "2026.07.15", "(x)+"])
def test_names_with_dots(run):
    names = [file_name(run, rank, i) for rank in (0, 10) for i in (0, 7, 12)] + [manifest_name(run, 7)]
    names += [file_name(run + ".0", 0, 99), file_name("b" + run, 0, 98), "tmp-" + file_name(run, 0, 97)]
    assert iterations_of(names, run, "0") == [0, 7, 12]
    assert iterations_of(names, run, "10") == [0, 7, 12]
    assert iterations_of(names, run, "1") == []
    assert iterations_of(names, run, "manifest") == [7]
    names = [file_name(f"tmp-{run}.0", 3, 7), manifest_name(f"tmp-{run}.0", 3)]  # of a run with such a name
    assert iterations_of(names, f"tmp-{run}.0", "3") == [7]
    assert temporaries_of(names, run, "0") == []
    assert temporaries_of([f"tmp-{run}.0.3.x_1", f"tmp-{run}.1.3.x_1", f"{run}.0.3"], run, "0") == [
        f"tmp-{run}.0.3.x_1"
    ]


MANIFEST = Manifest(7, (FileRecord("run.0.7", 5, "aa"), FileRecord("run.1.7", 6, "bb")))


def test_a_manifest_comes_back(tmp_path):
    write_manifest(tmp_path, "run", MANIFEST)
    assert read_manifest(tmp_path, "run", 7) == MANIFEST


@given(st.integers(0, 10_000), st.sampled_from(["cut", "flip", "zero"]))
def test_a_damaged_manifest_is_noticed(tmp_path_factory, position, how):
    folder = tmp_path_factory.mktemp("manifest")
    write_manifest(folder, "run", MANIFEST)
    path = folder / manifest_name("run", 7)
    content = bytearray(path.read_bytes())
    position %= len(content)
    if how == "cut":
        del content[position:]
    else:
        content[position] = 0 if how == "zero" else content[position] ^ 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"run\.manifest\.7"):
        read_manifest(folder, "run", 7)


def test_a_manifest_that_is_nested_too_deeply_is_damaged(tmp_path):
    (tmp_path / "run.manifest.7").write_text('{"content": ' + "[" * 200_000)
    with pytest.raises(ValueError, match=r"run\.manifest\.7 is damaged"):
        read_manifest(tmp_path, "run", 7)


def test_the_state_of_random_numbers_is_part_of_it():
    model = chainer.links.Linear(2, 3)
    state = state_of(model)
    first = np.random.rand(5)
    np.random.rand(100)
    load_state({name: array.copy() for name, array in state.items()}, model)
    np.testing.assert_array_equal(np.random.rand(5), first)


@pytest.mark.parametrize(
    ("saved", "target", "message"),
    [
        (chainer.Chain(a=chainer.links.Linear(2, 3)), chainer.Chain(b=chainer.links.Linear(2, 3)), "has no b/W"),
        (chainer.links.Linear(2, 3), chainer.links.Linear(2, 4), r"expected shape \(4, 2\) for W, got \(3, 2\)"),
    ],
)
def test_another_model_is_noticed_and_nothing_changed(saved, target, message):
    before = {name: param.data.copy() for name, param in target.namedparams()}
    with pytest.raises(ValueError, match=message):
        check_fits(state_of(saved), target)
    for name, param in target.namedparams():
        np.testing.assert_array_equal(param.data, before[name])


def test_a_parameter_still_to_be_initialised_fits():
    check_fits(state_of(chainer.links.Linear(2, 3)), chainer.links.Linear(None, 3))
    check_fits(state_of(chainer.links.Linear(None, 3)), chainer.links.Linear(2, 3))


def test_the_order_of_an_iterator_under_its_old_name():
    def updater():
        optimizer = chainer.optimizers.SGD().setup(chainer.links.Linear(2, 3))
        return chainer.training.StandardUpdater(chainer.iterators.SerialIterator(list(range(10)), 3), optimizer)

    saved, target = updater(), updater()
    state = state_of(saved)
    order = state.pop("iterator:main/order")
    with pytest.raises(ValueError, match="has no iterator:main/order"):
        check_fits(state, target)
    state["iterator:main/_order"] = order
    check_fits(state, target)
    load_state(state, target)
    np.testing.assert_array_equal(target.get_iterator("main")._state.order, order)
    with pytest.raises(ValueError, match=r"expected shape \(10,\) for iterator:main/order, got \(9,\)"):
        check_fits({**state, "iterator:main/_order": order[1:]}, target)
