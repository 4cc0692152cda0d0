"""Bins of a stream: each unit in one batch, uniformly and independently, and each epoch counted."""

import itertools

import numpy as np
import pytest
from scipy import stats
from torch.utils.data import DataLoader, IterableDataset

import dpcore
from dpcore import DPDataLoader, PrivacyError, UnsupportedError, bins_of_stream
from dpcore.accountants import PRVAccountant, RDPAccountant


class Stream(IterableDataset):
    def __init__(self, ids=range(100)):
        self.ids, self.read = ids, 0

    def __iter__(self):
        self.read += 1
        return iter(self.ids)


def places(stream, bins=5, accountant=None, **options):
    """The bin of each id, in the order of the ids."""
    dealt = dpcore.bins_of_stream(
        stream, lambda unit: unit, bins=bins, accountant=accountant or PRVAccountant(), noise_multiplier=1.0, **options
    )
    found = {unit: place for place, batch in enumerate(dealt) for unit in batch}
    return np.array([found[unit] for unit in stream.ids])


@pytest.mark.parametrize(("at_once", "readings"), [(1, 5), (2, 3), (5, 1), (9, 1)])
def test_every_unit_is_in_one_batch(at_once, readings):
    stream = Stream()
    batches = [
        *dpcore.bins_of_stream(stream, str, bins=5, accountant=PRVAccountant(), noise_multiplier=1.0, at_once=at_once)
    ]
    assert sorted(unit for batch in batches for unit in batch) == [*range(100)]
    assert (len(batches), stream.read) == (5, readings)


def test_places_are_uniform_and_independent_of_units_and_epochs():
    stream = Stream(range(4000))
    first, second = places(stream, at_once=5), places(stream, at_once=5)
    assert stats.chisquare(np.bincount(first, minlength=5)).pvalue > 1e-6
    for one, other in ((first, second), (first[::2], first[1::2])):
        table = np.zeros((5, 5))
        np.add.at(table, (one, other), 1)
        assert stats.chi2_contingency(table).pvalue > 1e-6


def test_an_epoch_counts_whole_once_it_has_begun():
    accountant, wanted = PRVAccountant(), PRVAccountant()
    given = {"bins": 5, "accountant": accountant, "noise_multiplier": 1.0}
    begun = dpcore.bins_of_stream(Stream(), str, **given)
    assert not accountant.history
    next(begun)
    places(Stream(), accountant=accountant)
    wanted.count_epochs(noise_multiplier=1.0, bins=5, epochs=2)
    assert accountant.get_epsilon(1e-3) == wanted.get_epsilon(1e-3)
    with pytest.raises(UnsupportedError, match="prv"):
        next(dpcore.bins_of_stream(Stream(), str, **given | {"accountant": RDPAccountant()}))


@pytest.mark.parametrize("ids", [["a", "b", "a"], [b"a", b"a"], [3, np.int64(3)]])
def test_a_unit_of_two_items_is_refused(ids):
    with pytest.raises(PrivacyError, match="Two items of the stream have the id"):
        places(Stream(ids))


@pytest.mark.parametrize(
    ("stream", "options", "named"),
    [
        (iter(range(3)), {}, "read once"),
        (Stream([1.5]), {}, "whole number, a text or bytes"),
        (Stream(), {"bins": 0}, "bins is 0"),
        (Stream(), {"at_once": 1.5}, "at_once is 1.5"),
    ],
)
def test_what_cannot_be_dealt_is_refused(stream, options, named):
    with pytest.raises((TypeError, ValueError), match=named):
        given = {"bins": 5, "accountant": PRVAccountant(), "noise_multiplier": 1.0} | options
        next(dpcore.bins_of_stream(stream, lambda unit: unit, **given))


@pytest.mark.parametrize("sampling", ["poisson", "bins", "shuffle"])
def test_loaders_of_streams_are_refused_by_the_name_of_their_sampling(sampling):
    with pytest.raises(UnsupportedError, match=f"sampling='{sampling}' draws .* dpcore.bins_of_stream"):
        DPDataLoader.from_data_loader(DataLoader(Stream(), batch_size=2), sample_rate=0.1, sampling=sampling)
    with pytest.raises(ValueError, match=f"sampling='{sampling}' draws .* dpcore.bins_of_stream"):
        DPDataLoader(Stream(), sample_rate=0.1, sampling=sampling)


def test_a_stream_with_other_items_in_a_later_reading_is_refused():
    class Once:
        def __init__(self):
            self.items = iter(range(50))

        def __iter__(self):
            return self.items

    numbers = itertools.count()
    for stream, unit_id in ((Once(), int), (range(50), lambda unit: next(numbers))):
        dealt = bins_of_stream(stream, unit_id, bins=5, accountant=PRVAccountant(), noise_multiplier=1.0)
        with pytest.raises(PrivacyError, match="were others when it was read again"):
            list(dealt)


def test_an_engine_is_no_accountant():
    with pytest.raises(TypeError, match=r"engine\.accountant say"):
        bins_of_stream(range(5), int, bins=2, accountant=dpcore.PrivacyEngine(), noise_multiplier=1.0)
