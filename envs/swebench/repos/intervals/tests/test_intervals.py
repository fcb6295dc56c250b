from intervals import gaps, merge, total


def test_apart():
    assert merge([(5, 6), (1, 2)]) == [(1, 2), (5, 6)]


def test_touching():
    assert merge([(1, 2), (2, 3)]) == [(1, 3)]


def test_total():
    assert total([(1, 3), (2, 4)]) == 3


def test_gaps():
    assert gaps([(2, 3)], (1, 5)) == [(1, 2), (3, 5)]


def test_no_gap():
    assert gaps([(1, 5)], (1, 5)) == []
