import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_hybrid.parallel.mesh import Layout, Mesh
from lightning_hybrid.strategies.loaders import (
    EvenLoader,
    agree_on_order,
    check_same_batch,
    fingerprint,
    remove_padding,
    seed_workers,
)
from tests.launch import run_ranks

CPU = torch.device("cpu")


@settings(max_examples=40)
@given(samples=st.integers(0, 20), replicas=st.integers(1, 5), shuffle=st.booleans())
def test_each_sample_goes_to_exactly_one_replica(samples, replicas, shuffle):
    seen = []
    for rank in range(replicas):
        sampler = DistributedSampler(range(samples), replicas, rank, shuffle=shuffle, seed=3)
        remove_padding(sampler)
        indices = list(sampler)
        assert len(indices) == len(sampler) == len(range(rank, samples, replicas))
        seen += indices
    assert sorted(seen) == list(range(samples))


def test_samplers_that_drop_or_are_of_another_kind_stay_as_they_are():
    dropping = DistributedSampler(range(7), 2, 0, shuffle=False, drop_last=True)
    remove_padding(dropping)
    assert list(dropping) == [0, 2, 4]
    sequential = SequentialSampler(range(3))
    remove_padding(sequential)
    remove_padding(None)
    assert list(sequential) == [0, 1, 2]


class Unsized:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


class Sized(Unsized):
    extra = "of the loader"

    def __len__(self):
        return len(self.batches)


class Raising(Unsized):
    def __len__(self):
        raise TypeError("an IterableDataset has no length")


def even_batches(kinds, numbers, limit):
    """Batches that this replica sees in two epochs, and which of them count."""
    mesh = Mesh(Layout(1, 3), device=CPU)
    rank = mesh.data_rank
    loader = EvenLoader(kinds[rank]([{"x": torch.tensor([10 * rank + i])} for i in range(numbers[rank])]), mesh)
    epochs = []
    for _ in range(2):
        batches = []
        for index, batch in enumerate(loader):
            batches.append((batch["x"].item(), index < loader.num_real))
            if index + 1 == limit:
                break
        epochs.append(batches)
    try:
        length = len(loader)
    except TypeError:
        length = None
    return epochs, length


def epochs_of(kinds, numbers, limit=None):
    results = run_ranks(3, even_batches, kinds, numbers, limit)
    for (first, second), _ in results:
        assert first == second
    return [epochs[0] for epochs, _ in results], [length for _, length in results]


def own(rank, number):
    return [(10 * rank + i, True) for i in range(number)]


@pytest.mark.parametrize(
    "kinds", [[Sized] * 3, [Unsized] * 3, [Sized, Raising, Unsized]], ids=["sized", "unsized", "mixed"]
)
def test_all_replicas_see_as_many_batches_and_surplus_ones_do_not_count(kinds):
    batches, lengths = epochs_of(kinds, [3, 1, 0])
    assert batches[0] == own(0, 3)
    assert batches[1] == [(10, True), (10, False), (10, False)]  # its last batch again
    assert batches[2] == [(0, False)] * 3  # it has none, so the first replica's
    assert lengths == ([3] * 3 if kinds == [Sized] * 3 else [None] * 3)


@pytest.mark.parametrize("kind", [Sized, Unsized])
@pytest.mark.parametrize("limit", [1, 2])
def test_a_limit_stops_all_replicas_at_the_same_batch(kind, limit):
    batches, _ = epochs_of([kind] * 3, [3, 0, 2], limit)
    assert batches == [own(0, limit), [(0, False)] * limit, own(2, limit)]


@pytest.mark.parametrize("kind", [Sized, Unsized])
def test_no_data_anywhere_is_no_batch(kind):
    assert epochs_of([kind] * 3, [0, 0, 0])[0] == [[], [], []]


def wrapped():
    mesh = Mesh(Layout(1, 1), device=CPU)
    loader = EvenLoader(Sized([1, 2]), mesh)
    with pytest.raises(AttributeError, match="missing"):
        _ = loader.missing
    with pytest.raises(TypeError, match="Unsized has no length"):
        len(EvenLoader(Unsized([1]), mesh))
    return loader.extra, list(loader), list(EvenLoader(DataLoader(range(5), batch_size=2), mesh))[-1].tolist()


def test_a_wrapped_loader_answers_for_itself():
    assert run_ranks(1, wrapped) == [("of the loader", [1, 2], [4])]


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: RandomSampler(range(9)),
        lambda: SubsetRandomSampler(range(9)),
        lambda: WeightedRandomSampler([1.0] * 9, 9),
    ],
    ids=["random", "subset", "weighted"],
)
def test_random_samplers_draw_alike_from_the_same_seed(sampler):
    orders = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(orders))  # the stages' own streams differ
        loader = DataLoader(range(9), sampler=sampler(), batch_size=9)
        agree_on_order(loader, seed, epoch=0)
        orders.append([batch.tolist() for _ in range(2) for batch in loader])
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][0] != orders[0][1]  # another order in the next epoch


def test_a_shuffling_loader_agrees_and_the_users_generator_is_kept():
    orders = []
    for stage in range(2):
        torch.manual_seed(stage)
        loader = DataLoader(range(9), shuffle=True, batch_size=9)
        agree_on_order(loader, 5, epoch=0)
        orders.append(next(iter(loader)).tolist())
    assert orders[0] == orders[1]
    generator = torch.Generator().manual_seed(7)
    loader = DataLoader(range(9), shuffle=True, generator=generator)
    agree_on_order(loader, 5, epoch=0)
    assert loader.generator is generator
    assert loader.sampler.generator is generator
    agree_on_order([1, 2], 5, epoch=0)  # something else that can be iterated is left alone


X = torch.arange(6.0)


@pytest.mark.parametrize(
    "other",
    [
        X + 1e-6,
        X.view(2, 3),
        X.double(),
        X.to(torch.int32),
        X.view(torch.int32),  # the same bytes
        [X, X],
        {"x": X, "y": torch.zeros(0)},
        X.flip(0),
    ],
    ids=["value", "shape", "type", "kind", "bytes", "twice", "empty", "order"],
)
def test_other_values_shapes_and_types_have_another_fingerprint(other):
    assert fingerprint(other) != fingerprint(X)


@pytest.mark.parametrize(
    "same",
    [{"x": X}, [X.clone()], torch.stack([X, X], 1)[:, 0], X.clone().requires_grad_(), ("text", X, None, 3)],
    ids=["dictionary", "copy", "strided", "grad", "other things"],
)
def test_only_tensors_and_their_values_count(same):
    assert fingerprint(same) == fingerprint([X])


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.int8, torch.float16])
def test_every_type_has_a_fingerprint(dtype):
    value = torch.tensor([0, 1, 1]).to(dtype)
    assert fingerprint(value) == fingerprint(value.clone())
    assert fingerprint(value) != fingerprint(value.flip(0))
    assert fingerprint(value[1]) == fingerprint(value[2])


def compared():
    mesh = Mesh(Layout(2, 2), device=CPU)
    check_same_batch({"x": torch.full((3,), float(mesh.data_rank))}, mesh)  # replicas may differ
    if mesh.data_rank == 0:
        with pytest.raises(RuntimeError, match=r"The ranks \[0, 2\] of one model replica were given different batches"):
            check_same_batch(torch.tensor([mesh.rank]), mesh)
    return True


def test_different_batches_on_two_stages_are_refused_on_all_ranks_of_the_replica():
    assert run_ranks(4, compared) == [True] * 4


@pytest.mark.parametrize("wanted", [True, False])
def test_workers_are_seeded_by_the_replica_where_the_user_wants_seeds(wanted, monkeypatch):
    monkeypatch.setenv("PL_SEED_WORKERS", str(int(wanted)))
    loader = DataLoader(range(3), num_workers=0)
    seed_workers(loader, 5)
    assert (loader.worker_init_fn is not None) == wanted
    if wanted:
        assert loader.worker_init_fn.func is pl_worker_init_function
        assert loader.worker_init_fn.keywords == {"rank": 5}
    own = DataLoader(range(3), worker_init_fn=print)
    seed_workers(own, 5)
    assert own.worker_init_fn is print
