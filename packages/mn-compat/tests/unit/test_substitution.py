import pytest

from mn_compat.substitution import Substitution, SubstitutionError, apply


def apply_to(text, *substitutions):
    return apply(substitutions, text, name="chainer.x", path="/site-packages/chainer/x.py")


def test_every_occurrence_is_exchanged():
    assert apply_to("a b a", Substitution("chainer.x", "a", "c", times=2)) == "c b c"


def test_substitutions_are_made_in_order():
    chain = Substitution("chainer.x", "a", "b"), Substitution("chainer.x", "b", "c")
    assert apply_to("a", *chain) == "c"


@pytest.mark.parametrize(("text", "found"), [("", 0), ("a", 1), ("a a a", 3)])
def test_another_number_of_occurrences_is_an_import_error(text, found):
    with pytest.raises(ImportError) as caught:
        apply_to(text, Substitution("chainer.x", "a", "c", times=2))
    assert isinstance(caught.value, SubstitutionError)
    assert f"expecting 2 of 'a' in /site-packages/chainer/x.py, found {found}" in str(caught.value)
    assert caught.value.name == "chainer.x"
    assert caught.value.path == "/site-packages/chainer/x.py"
