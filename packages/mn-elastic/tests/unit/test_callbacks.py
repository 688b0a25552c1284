import weakref

import pytest

from mn_elastic.callbacks import Callbacks


class Object:
    def __init__(self, heard):
        self.heard = heard

    def hear(self, what):
        self.heard.append(what)


def test_functions_are_called_in_order():
    heard, callbacks = [], Callbacks()
    callbacks.add(lambda what: heard.append(("first", what)))
    callbacks.add(lambda what: heard.append(("second", what)))
    callbacks(3)
    assert heard == [("first", 3), ("second", 3)]


def test_a_method_keeps_its_object_unless_it_is_weak():
    heard, callbacks = [], Callbacks()
    callbacks.add(Object(heard).hear)
    callbacks.add(weakref.WeakMethod(Object(heard).hear))
    kept = Object(heard)
    callbacks.add(weakref.WeakMethod(kept.hear))
    callbacks("x")
    assert heard == ["x", "x"]


def test_thousands_of_objects_that_are_gone_leave_nothing():
    callbacks = Callbacks()
    for _ in range(1000):
        callbacks.add(weakref.WeakMethod(Object([]).hear))
    assert len(callbacks._callbacks) == 1


def test_a_function_may_add_another_one():
    heard, callbacks = [], Callbacks()
    callbacks.add(lambda: callbacks.add(lambda: heard.append("later")))
    callbacks()
    assert heard == []
    callbacks()
    assert heard == ["later"]


def test_all_are_called_though_one_raises():
    heard, callbacks = [], Callbacks()
    for number in range(3):
        callbacks.add(heard.append)
        callbacks.add(lambda _, number=number: {}[number])
    with pytest.raises(KeyError, match="0"):
        callbacks("event")
    assert heard == ["event"] * 3
