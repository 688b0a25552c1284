"""Owners of parameters, parameters that belong together, and allowed attributes of rules."""

import chainer
import chainer.links as L
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mn_optim  # noqa: F401 - before Chainer
from mn_optim.sharding.parameters import aliases, expect_independent_rules, items_of, with_rules
from mn_optim.sharding.partition import Item, assign, join_groups

names = st.sampled_from("abcdefghij")
items = st.dictionaries(names, st.builds(Item, st.integers(0, 100), st.booleans()))


@given(items, st.lists(st.lists(names, min_size=1), max_size=3), st.integers(1, 5), st.dictionaries(names, st.just(0)))
def test_everything_has_an_owner(items, groups, n_ranks, kept):
    owners = assign(items, groups, n_ranks, kept)
    assert owners.keys() == items.keys()
    assert set(owners.values()) <= set(range(n_ranks))
    for group in join_groups(groups):
        assert len({owners[name] for name in group if name in owners}) <= 1
    assert owners == assign(dict(reversed(items.items())), list(reversed(groups)), n_ranks, kept)
    for name in kept.keys() & items.keys():
        if not any(name in group for group in groups):
            assert owners[name] == kept[name]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 5))
def test_bytes_are_balanced(sizes, n_ranks):
    owners = assign({str(i): Item(n, False) for i, n in enumerate(sizes)}, [], n_ranks, {})
    loads = [sum(n for i, n in enumerate(sizes) if owners[str(i)] == rank) for rank in range(n_ranks)]
    # The rank with the most had the least before it got its last parameter, which is its smallest.
    most = loads.index(max(loads))
    last = min(n for i, n in enumerate(sizes) if owners[str(i)] == most)
    assert max(loads) - last <= min(loads)


def test_largest_first():
    sizes = {"a": 3, "b": 1, "c": 5, "d": 4, "e": 3}
    assert assign({name: Item(n, False) for name, n in sizes.items()}, [], 2, {}) == {
        "c": 0, "d": 1, "a": 1, "e": 0, "b": 1
    }  # fmt: skip


def test_what_is_frozen_is_divided_by_itself():
    items = {name: Item(10, name > "d") for name in "abcdefgh"}
    owners = assign(items, [], 4, {})
    assert sorted(owners[name] for name in "abcd") == sorted(owners[name] for name in "efgh") == [0, 1, 2, 3]


def test_groups_that_have_a_name_in_common_are_one():
    assert join_groups(["ab", "cd", "bc", "e"]) == [["a", "b", "c", "d"], ["e"]]


def optimizer_of(**arrays):
    link = chainer.Link()
    with link.init_scope():
        for name, array in arrays.items():
            setattr(link, name, chainer.Parameter(array))
    return chainer.optimizers.Adam().setup(link)


def test_parameters_in_the_same_memory_belong_together():
    memory = np.zeros(100, "f4")
    optimizer = optimizer_of(
        a=memory[:10], b=memory[10:20], c=memory[19::-1][:1], d=memory[40:60:5], e=memory[50:51], f=np.zeros((0, 2)),
        g=np.zeros((0, 2)), h=np.zeros(())
    )  # fmt: skip
    params = with_rules(optimizer.target)
    assert aliases(params) == [["/b", "/c"], ["/d", "/e"]]
    optimizer.target.h.update_rule = optimizer.target.a.update_rule
    assert aliases(with_rules(optimizer.target)) == [["/a", "/h"], ["/b", "/c"], ["/d", "/e"]]


def test_what_owners_are_chosen_by():
    optimizer = optimizer_of(half=np.zeros(6, "f2"), other=np.zeros(3, "f8"), none=None, frozen=np.zeros(1, "f4"))
    optimizer.target.frozen.update_rule.enabled = False
    optimizer.target.other.update_rule = None
    assert items_of(with_rules(optimizer.target)) == {"/half": Item(12, False), "/frozen": Item(4, True)}
    optimizer.use_fp32_update = None
    optimizer.target.half.update_rule.use_fp32_update()
    assert items_of(with_rules(optimizer.target))["/half"] == Item(24, False)


@pytest.mark.parametrize("kind", ["Adam", "MSVAG", "SMORMS3", "RMSpropGraves", "AMSBound"])
def test_rules_of_chainer_stand_alone(kind):
    optimizer = getattr(chainer.optimizers, kind)().setup(L.Linear(3, 2))
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.1))
    optimizer.target.W.update_rule.add_hook(chainer.optimizer_hooks.GradientLARS())
    for param in optimizer.target.params():
        param.grad = np.ones_like(param.data)
    optimizer.update()
    expect_independent_rules(optimizer, optimizer.target, with_rules(optimizer.target))


@pytest.mark.parametrize(
    ("hold", "found"),
    [
        (lambda rule, link, optimizer: setattr(rule, "other", link.b), r"SGDRule of /W holds a Parameter \(b\)"),
        (lambda rule, link, optimizer: setattr(rule, "all", [{"x": link}]), "SGDRule of /W holds a Linear"),
        (lambda rule, link, optimizer: setattr(rule, "optimizer", optimizer), "SGDRule of /W holds a SGD"),
        (lambda rule, link, optimizer: setattr(rule, "read", lambda: link.b), "SGDRule of /W holds a Linear"),
        (lambda rule, link, optimizer: setattr(rule, "read", lambda link=link: link), "SGDRule of /W holds a Linear"),
        (lambda rule, link, optimizer: setattr(rule, "bound", link.namedparams), "SGDRule of /W holds a Linear"),
        (lambda rule, link, optimizer: rule.add_hook(lambda r, p: link, name="x"), "SGDRule of /W holds a Linear"),
    ],
)
def test_rules_that_hold_others(hold, found):
    optimizer = chainer.optimizers.SGD().setup(L.Linear(3, 2))
    optimizer.target.W.update_rule.own = [optimizer.target.W]
    expect_independent_rules(optimizer, optimizer.target, with_rules(optimizer.target))
    hold(optimizer.target.W.update_rule, optimizer.target, optimizer)
    with pytest.raises(TypeError, match=f"expected update rules that read only their own parameter, but {found}"):
        expect_independent_rules(optimizer, optimizer.target, with_rules(optimizer.target))
