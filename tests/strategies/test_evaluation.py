from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hybrid.parallel.mesh import Layout
from lightning_hybrid.strategies.evaluation import DataLoaders
from lightning_hybrid.strategies.loaders import own_generators
from lightning_hybrid.strategies.positions import Place

MESH = SimpleNamespace(layout=Layout(2, 1), data_rank=0, device=torch.device("cpu"))


def trained(loaders, made, epoch=0):
    """A training loader as Lightning prepares it: the barrier names the kind first."""
    loaders.announce("train_dataloader()")
    return loaders.process(made, MESH, 5, epoch=epoch)


def begin(loader, epoch):
    """As Lightning tells of an epoch."""
    loader.sampler.set_epoch(epoch)
    loader.batch_sampler.sampler.set_epoch(epoch)


def order(loader):
    return torch.cat(list(loader)).tolist()


def shuffled(generator=None):
    return DataLoader(range(9), 3, shuffle=True, generator=generator)


def test_the_order_of_an_epoch_is_that_of_its_number():
    first = trained(DataLoaders(), shuffled())
    orders = []
    for epoch in range(3):
        begin(first, epoch)
        orders.append(order(first))
    assert len({tuple(each) for each in orders}) == 3
    later = trained(DataLoaders(), shuffled(), epoch=2)
    begin(later, 2)
    assert order(later) == orders[2]


def test_the_users_generators_go_on_where_they_were():
    def generator():
        return torch.Generator().manual_seed(1)

    loaders, resumed = DataLoaders(), DataLoaders()
    first = trained(loaders, shuffled(generator()))
    order(first)
    states = [generator.get_state() for generator in own_generators(first)]
    assert len(states) == 1  # the loader and its sampler share one
    following = order(first)
    resumed.resume(Place(states))
    assert order(trained(resumed, shuffled(generator()))) == following
    assert order(trained(resumed, shuffled(generator()))) != following  # once


def test_validation_loaders_are_not_resumed():
    loaders = DataLoaders()
    loaders.resume(Place([torch.Generator().manual_seed(3).get_state()]))
    loaders.announce("val_dataloader()")
    own = torch.Generator().manual_seed(4)
    before = own.get_state()
    loaders.process(DataLoader(range(3), generator=own), MESH, 5, epoch=0)
    assert torch.equal(own.get_state(), before)


class Noting:
    """A batch sampler that notes what it has given, as Lightning's does while predicting."""

    def __init__(self, seen):
        self.seen_batch_indices = seen


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([[3, 1], [2]], [[3, 1], [2], None]),
        ([list(numpy.array([4, 2]))], [[4, 2]]),
        ([["a"]], [None]),
        ([], [None]),
        (None, [None]),
    ],
)
def test_samples_are_known_where_the_sampler_notes_whole_numbers(seen, expected):
    loaders = DataLoaders()
    loaders.announce("predict_dataloader()")
    loader = SimpleNamespace(batch_sampler=Noting(seen))
    loaders.process(loader, MESH, 5, epoch=0)
    found = []
    for _ in expected:
        assert loaders.next_counts("predict", 0)
        found.append(loaders.seen_indices("predict", 0))
    assert found == expected
