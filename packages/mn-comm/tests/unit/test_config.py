import numpy as np
import pytest

from mn_comm.basis.config import Config


def test_a_changed_setting_is_a_new_configuration():
    config = Config()
    changed = config.with_value("batched_copy", False)
    assert changed.get("batched_copy") is False
    assert config.get("batched_copy") is True


def test_all_settings():
    assert Config().get() == {"allreduce_grad_dtype": None, "batched_copy": True}


def test_unknown_name():
    with pytest.raises(
        ValueError, match="expected the name of a setting, one of allreduce_grad_dtype, batched_copy; got 'batched'"
    ):
        Config().with_value("batched", True)
    with pytest.raises(ValueError, match="got 'batched'"):
        Config().get("batched")


def test_wrong_type():
    with pytest.raises(TypeError, match="expected a bool for batched_copy, got str: 'no'"):
        Config().with_value("batched_copy", "no")


@pytest.mark.parametrize("value", ["float16", np.float32, np.dtype("f8")])
def test_wire_dtypes(value):
    assert Config().with_value("allreduce_grad_dtype", value).get("allreduce_grad_dtype") == np.dtype(value)


def test_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for value in ("bfloat16", ml_dtypes.bfloat16):
        assert Config().with_value("allreduce_grad_dtype", value).get("allreduce_grad_dtype") == ml_dtypes.bfloat16


@pytest.mark.parametrize("value", [np.int32, "complex64", bool])
def test_dtypes_in_which_gradients_cannot_travel(value):
    with pytest.raises(
        ValueError, match="expected float16, bfloat16, float32, float64 or None for allreduce_grad_dtype"
    ):
        Config().with_value("allreduce_grad_dtype", value)


def test_what_is_no_dtype():
    with pytest.raises(TypeError, match="for allreduce_grad_dtype, got str: 'half precision'"):
        Config().with_value("allreduce_grad_dtype", "half precision")
