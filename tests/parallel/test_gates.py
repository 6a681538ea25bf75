import copy
import functools

import pytest
import torch
from torch import nn

from lightning_hybrid.parallel.pipeline.gates import (
    Gate,
    GateKeeper,
    add_gate,
    fork_random_streams,
    guard_attribute,
    hollow,
    remove_gate,
    seed_random_streams,
)

CPU = torch.device("cpu")


class Doubling(nn.Linear):
    """A subclass whose forward calls its parent's."""

    def forward(self, x, *, times=2):
        return times * super().forward(x)


class Answering:
    """A run that notes the calls it is asked about, and lets them proceed."""

    stage, is_probe, entered = 0, False, True

    def __init__(self):
        self.calls = []

    def call(self, gate, proceed, args, kwargs):
        self.calls.append((gate.name, len(args), dict(kwargs)))
        return proceed(*args, **kwargs)


def gated(module=None, *, owned=True, position=0):
    module = module or Doubling(2, 2)
    gate = Gate(GateKeeper(CPU), "model.layers.0", position, owned=owned)
    add_gate(module, gate)
    return module, gate


def test_a_gate_changes_nothing_that_can_be_seen():
    torch.manual_seed(1)
    plain = Doubling(2, 2)
    module, _ = gated(copy.deepcopy(plain))
    x = torch.ones(1, 2)
    assert torch.equal(module(x, times=3), plain(x, times=3))
    assert isinstance(module, Doubling)
    assert type(module).__name__ == "Doubling"
    assert type(module).__qualname__ == Doubling.__qualname__
    assert type(module).__module__ == __name__
    assert repr(module) == repr(plain)
    assert list(module.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in module.named_modules()] == [""]
    module.load_state_dict(plain.state_dict())


def test_a_run_answers_calls_with_their_arguments_and_only_while_it_is_active():
    module, gate = gated()
    run = gate.keeper.active = Answering()
    module(torch.ones(1, 2), times=1)
    gate.keeper.active = None
    module(torch.ones(1, 2))
    assert run.calls == [("model.layers.0", 1, {"times": 1})]


def test_the_gate_is_outside_of_hooks_and_compiled_calls():
    module, gate = gated()
    seen = []
    module.register_forward_pre_hook(lambda *_: seen.append("pre"))
    module.register_forward_hook(lambda *_: seen.append("post"))

    class Swallowing(Answering):
        def call(self, gate, proceed, args, kwargs):
            return "answer"

    gate.keeper.active = Swallowing()
    assert module(torch.ones(1, 2)) == "answer"
    assert seen == []
    gate.keeper.active = Answering()
    module(torch.ones(1, 2))
    assert seen == ["pre", "post"]


def test_calling_forward_directly_goes_past_the_gate():
    module, gate = gated()
    gate.keeper.active = run = Answering()
    module.forward(torch.ones(1, 2))
    assert run.calls == []


def test_a_module_that_lives_elsewhere_refuses_calls_outside_a_step():
    module, _ = gated(owned=False)
    with pytest.raises(RuntimeError, match=r"model\.layers\.0 was called outside a step.*lives on another"):
        module(torch.ones(1, 2))


def test_a_copy_answers_to_the_same_run_with_weights_of_its_own():
    module, gate = gated(nn.Sequential(Doubling(2, 2)))
    clone = copy.deepcopy(module)
    with torch.no_grad():
        clone[0].weight.zero_()
    assert module[0].weight.abs().sum() > 0
    gate.keeper.active = run = Answering()
    clone(torch.ones(1, 2))
    assert run.calls == [("model.layers.0", 1, {})]


def test_two_instances_of_one_class_have_gates_of_their_own():
    (one, first), (other, second) = gated(), gated()
    first.keeper.active = run = Answering()
    other(torch.ones(1, 2))
    assert run.calls == []
    assert type(Doubling(2, 2)) is Doubling
    assert isinstance(one, type(other).__mro__[1])
    assert second.keeper.active is None


def test_all_modules_of_a_class_share_a_gated_class_for_which_code_is_compiled_once():
    first, second, other = gated()[0], gated()[0], gated(nn.Linear(2, 2))[0]
    assert type(first) is type(second)
    assert type(first) is not type(other)
    assert isinstance(other, nn.Linear)
    assert not isinstance(other, Doubling)


def test_a_gate_that_is_removed_leaves_the_module_as_it_was():
    module = Doubling(2, 2)
    before = {name: id(value) for name, value in vars(module).items()}
    gated(module, owned=False)
    remove_gate(module)
    assert type(module) is Doubling
    assert {name: id(value) for name, value in vars(module).items()} == before
    assert module(torch.ones(1, 2)).shape == (1, 2)


def test_a_random_module_moves_the_steps_stream_by_one_number_whatever_it_draws():
    after = []
    for p, size in [(0.5, 3), (0.1, 1000)]:
        module, gate = gated(nn.Dropout(p))
        gate.random = True
        torch.manual_seed(7)
        module(torch.ones(size))
        after.append(torch.rand(1).item())
    torch.manual_seed(7)
    GateKeeper.draw_seed()
    assert after == [torch.rand(1).item()] * 2


def test_a_random_module_repeats_its_numbers_from_the_same_stream_and_differs_between_calls():
    module, gate = gated(nn.Dropout(0.5))
    gate.random = True
    torch.manual_seed(7)
    first, second = module(torch.ones(50)), module(torch.ones(50))
    torch.manual_seed(7)
    assert torch.equal(module(torch.ones(50)), first)
    assert not torch.equal(first, second)


class Noise(nn.Module):
    def forward(self):
        return torch.rand(50)


def test_the_numbers_of_two_random_modules_have_nothing_in_common():
    module, gate = gated(Noise())
    gate.random = True
    first, second, outside = module(), module(), torch.rand(50)
    assert len({*first.tolist(), *second.tolist(), *outside.tolist()}) > 140  # of 150; as good as no collisions


def draw_and_fail():
    seed_random_streams(99, CPU)
    torch.rand(5)
    raise ValueError("inside")


def test_streams_are_restored_after_a_fork_even_by_an_error():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with pytest.raises(ValueError, match="inside"), fork_random_streams(CPU):
        draw_and_fail()
    assert torch.equal(torch.rand(2), expected)


def test_seeding_a_stream_is_torchs_seeding():
    torch.manual_seed(2**62 - 5)
    expected = torch.rand(3)
    seed_random_streams(2**62 - 5, CPU)
    assert torch.equal(torch.rand(3), expected)


class Caching(nn.Module):
    """A block that keeps something while it runs."""

    default = None

    @functools.cached_property
    def table(self):
        return [1, 2]


def guarded(attribute, *, readable=True):
    module, state = Caching(), {"readable": readable}
    module.__dict__["aux"] = 5
    guard_attribute(module, "layers.3", attribute, lambda: state["readable"])
    return module, state


def test_a_guarded_attribute_can_be_read_only_where_it_is_known():
    module, state = guarded("aux")
    assert module.aux == 5
    state["readable"] = False
    module.aux = 6  # writing is always allowed
    for read in (lambda: module.aux, lambda: getattr(module, "aux", None), lambda: hasattr(module, "aux")):
        with pytest.raises(
            RuntimeError, match=r"layers\.3\.aux is set while layers\.3 runs, on another pipeline stage"
        ):
            read()
    state["readable"] = True
    assert module.aux == 6
    assert vars(module)["aux"] == 6


def test_a_guarded_attribute_can_be_deleted_and_set_again():
    module, _ = guarded("aux")
    del module.aux
    assert not hasattr(module, "aux")
    module.aux = torch.ones(2)
    assert module.aux.tolist() == [1, 1]
    module.aux = None
    assert module.aux is None


def test_a_guarded_attribute_falls_back_to_the_default_of_the_class():
    module, _ = guarded("default")
    assert module.default is None
    module.default = 3
    assert module.default == 3
    del module.default
    assert module.default is None


def test_a_guarded_cached_property_is_computed_once():
    module, _ = guarded("table")
    assert module.table == [1, 2]
    assert module.table is module.table


def test_a_guarded_attribute_that_was_never_set_is_missing_as_usual():
    module, _ = guarded("other")
    with pytest.raises(AttributeError, match="other"):
        _ = module.other
    assert getattr(module, "other", 7) == 7


def test_two_guards_and_a_gate_live_on_one_module():
    module, state = guarded("aux")
    guard_attribute(module, "layers.3", "table", lambda: True)
    gate = Gate(GateKeeper(CPU), "layers.3", 3, owned=False)
    add_gate(module, gate)
    assert (module.aux, module.table) == (5, [1, 2])
    state["readable"] = False
    with pytest.raises(RuntimeError, match="on another pipeline stage, and is not known"):
        _ = module.aux
    with pytest.raises(RuntimeError, match="called outside a step"):
        module(1)
    assert isinstance(module, Caching)


def test_a_guard_is_on_one_instance():
    guarded("aux", readable=False)
    free = Caching()
    free.aux = 1
    assert free.aux == 1


def test_a_hollow_parameter_keeps_its_shape_and_nothing_else():
    module = nn.Linear(300, 200).double()
    stand_in = hollow(module, "weight", CPU)
    assert module.weight is stand_in
    assert (stand_in.shape, stand_in.dtype, stand_in.requires_grad) == ((200, 300), torch.float64, False)
    assert stand_in.untyped_storage().nbytes() == 8
    assert [name for name, _ in module.named_parameters()] == ["bias"]
    assert list(module.state_dict()) == ["bias"]
    assert module(torch.ones(1, 300).double()).shape == (1, 200)  # code that only looks at shapes runs


def test_a_hollow_parameter_without_dimensions():
    module = nn.Module()
    module.scale = nn.Parameter(torch.tensor(2.0))
    assert hollow(module, "scale", CPU).shape == ()
