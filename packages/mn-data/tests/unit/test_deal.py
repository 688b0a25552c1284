"""Every sample once per epoch, however many are dealt at a time, and whatever is given back."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mn_data.deal import Deal


def test_epochs_have_orders_of_their_own():
    deal, again = Deal(20, 3), Deal(20, 3)
    one, two = (deal.indices(deal.draw(20)) for _ in range(2))
    assert sorted(one) == sorted(two) == list(range(20))
    assert one != two
    assert again.indices(again.draw(40)) == one + two
    assert Deal(5, None).indices(np.arange(12)) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_what_is_given_back_comes_next():
    deal = Deal(10, 0)
    drawn = deal.draw(6)
    deal.give_back(drawn[[1, 4]])
    assert deal.dealt == 4
    assert deal.peek(3).tolist() == deal.draw(3).tolist() == [1, 4, 6]


@given(st.integers(1, 30), st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40))
def test_no_sample_is_lost_or_dealt_twice(length, batches):
    deal, used = Deal(length, 1), []
    for count, is_lost in batches:
        drawn = deal.draw(count)
        kept = drawn[1::2] if is_lost else drawn
        used += kept.tolist()
        if is_lost:
            deal.give_back(drawn[::2])
    used += deal.draw(len(deal.returned)).tolist()
    assert sorted(used) == list(range(deal.dealt))
    per_epoch = Counter(
        (place // length, index) for place, index in zip(used, deal.indices(np.array(used, int)), strict=True)
    )
    assert set(per_epoch.values()) <= {1}


def test_a_state_counts_what_is_under_way_as_not_dealt():
    deal = Deal(10, 5)
    deal.draw(4)
    under_way = deal.draw(4)
    other = Deal(10, 5)
    other.load(*deal.state(under_way))
    assert other.draw(6).tolist() == [4, 5, 6, 7, 8, 9]
