import pytest

from mn_comm.config import Config


def test_a_changed_setting_is_a_new_configuration():
    config = Config()
    changed = config.with_value("batched_copy", False)
    assert changed.get("batched_copy") is False
    assert config.get("batched_copy") is True


def test_all_settings():
    assert Config().get() == {"batched_copy": True}


def test_unknown_name():
    with pytest.raises(ValueError, match="expected the name of a setting, one of batched_copy; got 'batched'"):
        Config().with_value("batched", True)
    with pytest.raises(ValueError, match="got 'batched'"):
        Config().get("batched")


def test_wrong_type():
    with pytest.raises(TypeError, match="expected a bool for batched_copy, got str: 'no'"):
        Config().with_value("batched_copy", "no")
