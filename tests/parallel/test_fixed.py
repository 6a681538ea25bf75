import torch
from torch import nn

from lightning_hybrid.parallel.ledgers.fixed import FixedStorages


class Gathered(nn.Linear):
    """Has another weight while it runs, as under `fully_shard`, and asks about it and about its result."""

    fixed, answers = None, None

    def forward(self, x):
        self.weight = nn.Parameter(self.weight.detach().clone())
        y = super().forward(x)
        self.answers.append([self.fixed.is_fixed(t) for t in (self.weight.t(), y)])
        return y


def test_views_of_parameters_and_buffers_are_fixed_and_activations_are_not():
    net = nn.BatchNorm1d(3)
    fixed = FixedStorages(net)
    fixed.start()
    assert all(fixed.is_fixed(t.detach().view(-1)[1:]) for t in (net.weight, net.running_mean))
    assert not fixed.is_fixed(net(torch.ones(2, 3)))


def test_parameters_that_come_within_the_first_step_are_found_where_they_are_used():
    net, met = nn.Sequential(Gathered(2, 2), Gathered(2, 3)), []
    Gathered.fixed = FixedStorages(net, lambda module, tensor: met.append((module, tuple(tensor.shape))))
    Gathered.answers = []
    Gathered.fixed.start()
    assert met == [(net[0], (2, 2)), (net[0], (2,)), (net[1], (3, 2)), (net[1], (3,))]
    del met[:]
    net(torch.ones(1, 2))
    assert Gathered.answers == [[True, False]] * 2
    assert met[0] == (net[0], (2, 2))
    assert met[-1] == (net[1], (3, 2))
