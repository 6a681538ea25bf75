import numpy
import pytest
import torch
from torch import nn

from lightning_hybrid.parallel.pipeline.provenance import LIVE, AbsentValueError, Provenance, Sources, tensors_of


@pytest.fixture
def followed():
    """A provenance, and tensors from an absent, a held and no source."""
    provenance = Provenance()
    absent = provenance.sources.add("layers.0", absent=True)
    held = provenance.sources.add("head.weight")
    x, w, plain = torch.ones(2, 3), torch.ones(3, 3), torch.ones(2, 3)
    provenance.set(x, absent)
    provenance.set(w, held)
    return provenance, absent, held, x, w, plain


def test_bits_are_distinct_and_named_oldest_first():
    sources = Sources()
    bits = [sources.add(name, absent=name == "b") for name in "abc"]
    assert len({*bits, LIVE}) == 4
    assert sources.names(bits[2] | bits[0] | LIVE) == ["a", "c"]
    assert sources.absent == bits[1]


def test_an_operations_result_has_the_sources_of_its_inputs(followed):
    provenance, absent, held, x, w, plain = followed
    with provenance:
        assert provenance.of(x @ w) == absent | held
        assert provenance.of(torch.relu(x).sum()) == absent
        assert provenance.of(torch.cat([plain, x])) == absent
        assert provenance.of(torch.where(x > 0, plain, w[:2])) == absent | held
        assert provenance.of(plain + 1) == 0
        assert [provenance.of(part) for part in x.topk(2)] == [absent, absent]
        assert provenance.of(nn.functional.linear(plain, w)) == held
        assert provenance.of(torch.zeros_like(x) * plain) == absent  # the shape came from it; conservative


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x[0],
        lambda x: x.t(),
        lambda x: x.view(-1)[2:4],
        lambda x: x.detach(),
        lambda x: x.data,
        lambda x: x[None].expand(4, *x.shape),
    ],
    ids=["index", "transpose", "slice of a view", "detach", "data", "expand"],
)
def test_views_share_the_sources_of_their_memory_both_ways(followed, look):
    provenance, absent, held, x, w, plain = followed
    with provenance:
        assert provenance.of(look(x)) == absent
        early = look(plain)
        plain.add_(w[:2])
        assert provenance.of(early) == held
    view = look(w)
    provenance.set(view, LIVE)
    assert provenance.of(w) == LIVE


@pytest.mark.parametrize(
    "write",
    [
        lambda to, x: to.add_(x),
        lambda to, x: to.copy_(x),
        lambda to, x: to[0].mul_(x[0]),
        lambda to, x: to.__setitem__((slice(None), 1), x[:, 1]),
        lambda to, x: to.index_add_(0, torch.tensor([1]), x[:1]),
        lambda to, x: to.masked_fill_(x > 0, 3.0),
        lambda to, x: torch.add(x, 1, out=to),
        lambda to, x: to.view(-1).scatter_(0, torch.tensor([0]), x[0, :1]),
    ],
    ids=["add", "copy", "row", "setitem", "index_add", "mask", "out", "scatter"],
)
def test_writing_in_place_adds_the_source_to_the_memory(followed, write):
    provenance, absent, _, x, _, plain = followed
    with provenance:
        write(plain, x)
        assert provenance.of(plain) == absent
        assert provenance.of(plain[1] * 2) == absent


def test_gradients_being_recorded_do_not_hide_sources(followed):
    provenance, absent, held, x, _, _ = followed
    layer = nn.Linear(3, 3)
    provenance.set(layer.weight, held)
    with provenance:
        assert provenance.of(layer(x)) == absent | held
        with torch.no_grad():
            assert provenance.of(layer(x)) == absent | held


def test_the_memory_of_a_freed_tensor_does_not_hand_its_sources_on(followed):
    provenance, absent, *_ = followed
    for _ in range(50):
        tensor = torch.ones(64)
        provenance.set(tensor, absent)
        del tensor
        assert provenance.of(torch.empty(64)) == 0


def test_empty_tensors_have_sources_of_their_own(followed):
    provenance, absent, *_ = followed
    one, other = torch.empty(0), torch.empty(0)
    provenance.set(one, absent)
    assert provenance.of(one) == absent
    assert provenance.of(other) == 0


def test_set_replaces_and_add_joins(followed):
    provenance, _, held, x, w, plain = followed
    provenance.set(x, LIVE)
    provenance.add([w, plain], LIVE)
    assert [provenance.of(tensor) for tensor in (x, w, plain)] == [LIVE, held | LIVE, LIVE]
    assert provenance.union({"a": [x, 3], "b": w, "c": None}) == LIVE | held


READS = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0, 0]),
    "bool": lambda x: bool(x.sum() > 0),
    "if": lambda x: 1 if x[0, 0] else 0,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": numpy.asarray,
    "dlpack": lambda x: torch.from_dlpack(x),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "format": lambda x: f"{x.mean():.2f}",
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: torch.repeat_interleave(torch.arange(3), x[0].long()),
    "index by value": lambda x: torch.arange(5)[int(x[0, 0])],
    "range": lambda x: list(range(x[0, 0].long())),
}
each_read = pytest.mark.parametrize("read", READS.values(), ids=READS.keys())


@each_read
def test_python_cannot_read_an_absent_value(followed, read):
    provenance, _, _, x, _, _ = followed
    with provenance, pytest.raises(AbsentValueError, match=r"Python number .* from the output of layers\.0"):
        read(x)


@each_read
def test_python_may_read_values_that_are_here_and_outside_the_run_all(followed, read):
    provenance, _, _, x, w, plain = followed
    with provenance:
        read(w)
        read(plain)
    read(x)


def test_indexing_with_absent_integers_keeps_the_shape_and_is_followed(followed):
    provenance, absent, held, x, w, plain = followed
    with provenance:
        assert provenance.of(w[x.long()[:, 0]]) == absent | held
        assert x[plain > 0].shape == (6,)  # the mask is known
        with pytest.raises(AbsentValueError):
            plain[x > 0]


def test_refusal_names_reader_and_sources_and_lets_known_values_pass(followed):
    provenance, absent, held, *_ = followed
    second = provenance.sources.add("layers.1", absent=True)
    provenance.refuse_absent(held | LIVE, "layers.2")
    with pytest.raises(AbsentValueError, match=r"layers\.2 reads a value of layers\.0, which lives on an earlier"):
        provenance.refuse_absent(absent | held, "layers.2")
    with pytest.raises(AbsentValueError, match=r"of layers\.0, layers\.1, which live on"):
        provenance.refuse_absent(absent | second, "layers.2")


def test_tensors_of_a_tree_are_found_among_other_things():
    x, y = torch.zeros(1), torch.zeros(2)
    assert [id(t) for t in tensors_of({"a": (x, "text"), "b": [None, {"c": y}]})] == [id(x), id(y)]
