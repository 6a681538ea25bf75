import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_hybrid.parallel.ledgers.fixed import FixedStorages
from lightning_hybrid.parallel.ledgers.running import RunningModules


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


class Direct(nn.Module):
    """Calls its block's forward itself, as a recomputation does."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2))
        self.seen = []

    def forward(self, x):
        self.block[0].register_forward_hook(lambda *_: self.seen.append(self.running.now()))
        return self.block.forward(x)


def test_modules_run_also_where_their_forward_is_called_directly():
    net = Direct()
    net.running = RunningModules(net)
    net.running.update()
    net(torch.ones(1, 2))
    assert net.seen == [[net.block[0], net.block, net]]
    assert net.running.now() == []
    assert net.running.names[id(net.block[0])] == "block.0"


def test_nothing_lives_on_because_somebody_has_looked_at_what_runs():
    class Loop(nn.Module):
        def forward(self, x):
            for _ in range(3):
                x = x + 1
                storage = StorageWeakRef(x.untyped_storage())
                self.running.now()
                x = x + 1
                self.expired.append(storage.expired())
            return x

    net = Loop()
    net.running, net.expired = RunningModules(net), []
    net.running.update()
    net(torch.ones(1))
    assert net.expired == [True] * 3
