import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from torchmetrics import MeanMetric, MetricCollection

from lightning_hybrid.strategies.records import Entry, Exchange, Key, Recorder, outputs, replay
from tests.launch import run_ranks

CPU = torch.device("cpu")


def number(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype)


@settings(max_examples=30)
@given(pairs=st.lists(st.tuples(st.integers(-99, 99), st.integers(0, 9)), min_size=1, max_size=6))
def test_a_mean_is_kept_as_weighted_sum_and_weight_and_the_rest_as_value_and_count(pairs):
    values, weights = [number(float(v)) for v, _ in pairs], [float(w) for _, w in pairs]
    entry = Entry(values, weights)
    total, weight = entry.combine("mean")
    assert (total.dtype, total.item(), weight) == (torch.float64, sum(v * w for v, w in pairs), sum(weights))
    for reduction, function in [("sum", sum), ("max", max), ("min", min)]:
        value, count = entry.combine(reduction)
        assert (value.item(), count) == (function(v for v, _ in pairs), len(pairs))


def test_nan_without_weight_does_not_count_and_nan_with_weight_does():
    values = [number(math.nan), number(2.0)]
    assert Entry(values, [0.0, 4.0]).combine("mean")[0].item() == 8
    assert math.isnan(Entry(values, [1.0, 4.0]).combine("mean")[0].item())
    assert math.isnan(Entry(values, [1.0, 1.0]).combine("max")[0].item())


def recorder_of(module=None, keeper=None):
    module = module or LightningModule()
    return module, Recorder(module, keeper, CPU)


def only(recorder):
    ((key, entry),) = recorder.entries.items()
    return key, entry


def test_the_same_name_in_two_micro_batches_is_one_entry_and_twice_in_one_step_two():
    module, recorder = recorder_of()
    for samples, value in [(3, 1.0), (2, 2.0)]:
        with recorder.recording(samples):
            module.log("loss", value)
            module.log("loss", value + 10)
    found = [(key.name, key.occurrence, entry) for key, entry in recorder.entries.items()]
    assert [(name, occurrence, entry.weights) for name, occurrence, entry in found] == [
        ("loss", 0, [3, 2]),
        ("loss", 1, [3, 2]),
    ]
    assert [[value.item() for value in entry.values] for *_, entry in found] == [[1, 2], [11, 12]]


def test_the_users_own_batch_size_is_the_weight():
    module, recorder = recorder_of()
    with recorder.recording(3):
        module.log("a", 1.0, batch_size=7)
    assert only(recorder)[1].weights == [7]


@pytest.mark.parametrize(
    ("value", "stored", "dtype"),
    [
        (1.5, 1.5, torch.float32),
        (3, 3.0, torch.float32),
        (True, 1.0, torch.float32),
        (torch.tensor(4), 4.0, torch.float32),
        (torch.tensor([[2.5]], dtype=torch.float64), 2.5, torch.float64),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5, torch.bfloat16),
    ],
)
def test_values_become_scalars_without_a_graph(value, stored, dtype):
    module, recorder = recorder_of()
    with recorder.recording(1):
        module.log("a", value)
    key, entry = only(recorder)
    assert (entry.values[0].item(), entry.values[0].shape, entry.values[0].requires_grad) == (stored, (), False)
    assert key.dtype == entry.values[0].dtype == dtype


def test_a_recorded_tensor_does_not_change_when_the_user_changes_his():
    module, recorder = recorder_of()
    value = torch.tensor(1.0)
    with recorder.recording(1):
        module.log("a", value)
        value.add_(5)
    assert only(recorder)[1].values[0].item() == 1


def test_a_dictionary_is_logged_entry_by_entry_with_its_flags():
    module, recorder = recorder_of()
    with recorder.recording(2):
        module.log_dict({"a": 1.0, "b": 2.0}, prog_bar=True, on_epoch=True)
    assert [key.name for key in recorder.entries] == ["a", "b"]
    assert dict(next(iter(recorder.entries)).flags) == {"prog_bar": True, "on_epoch": True, "add_dataloader_idx": True}


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("mean", "mean"),
        ("avg", "mean"),
        (torch.mean, "mean"),
        (sum, None),
        (torch.sum, "sum"),
        (max, "max"),
        (torch.min, "min"),
    ],
)
def test_reductions_go_by_name_or_function(function, name):
    module, recorder = recorder_of()
    with recorder.recording(1):
        if name is None:
            with pytest.raises(
                ValueError, match=r"reduce_fx=<built-in function sum>.*'mean', 'sum', 'max' or 'min' only"
            ):
                module.log("a", 1.0, reduce_fx=function)
        else:
            module.log("a", 1.0, reduce_fx=function)
            assert only(recorder)[0].reduction == name


def test_what_is_no_scalar_or_an_unknown_metric_is_refused():
    module, recorder = recorder_of()
    with recorder.recording(1):
        with pytest.raises(ValueError, match=r"takes a scalar, got shape \[2\]"):
            module.log("a", torch.ones(2))
        with pytest.raises(ValueError, match="not an attribute of the LightningModule"):
            module.log("m", MeanMetric())


def test_metrics_are_recorded_by_the_attribute_that_holds_them():
    module, recorder = recorder_of()
    module.scores = MetricCollection({"mean": MeanMetric()})
    module.plain = MeanMetric()
    with recorder.recording(5):
        module.log("m", module.scores["mean"])
        module.log("p", module.plain, metric_attribute="plain")
    assert [dict(key.flags)["metric_attribute"] for key in recorder.entries] == ["scores.mean", "plain"]
    assert {key.kind for key in recorder.entries} == {"metric"}


def test_outside_of_the_context_the_module_logs_as_ever():
    module, recorder = recorder_of()
    own = module.log
    with recorder.recording(1):
        assert module.log != own
    assert module.log == own
    assert "log" not in vars(module)
    with pytest.raises(ZeroDivisionError), recorder.recording(1):
        1 / 0  # noqa: B018
    assert "log" not in vars(module)


def test_a_recording_inside_a_recording_ends_without_ending_the_outer_one():
    module, outer = recorder_of()
    inner = Recorder(module, None, CPU)
    with outer.recording(1):
        with inner.recording(1):
            module.log("inside", 1.0)
        module.log("behind", 2.0)
    assert [key.name for key in inner.entries] == ["inside"]
    assert [key.name for key in outer.entries] == ["behind"]
    assert "log" not in vars(module)


def test_stages_that_have_not_been_entered_and_probes_record_nothing():
    seen = []
    run = SimpleNamespace(entered=False, is_probe=False, observe=lambda value, reader: seen.append(reader))
    module, recorder = recorder_of(keeper=SimpleNamespace(active=run))
    with recorder.recording(1):
        module.log("a", 1.0)
        run.entered, run.is_probe = True, True
        module.log("b", 1.0)
        run.is_probe = False
        module.log("c", 1.0)
    assert [key.name for key in recorder.entries] == ["c"]
    assert seen == ["self.log('b', ...)", "self.log('c', ...)"]


class Logging(LightningModule):
    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()
        self.calls = []

    def log(self, name, value, **options):
        self.calls.append((name, value if isinstance(value, MeanMetric) else (value.item(), value.dtype), options))


def test_a_replay_logs_combined_values_in_their_type_with_their_flags_and_weight():
    module = Logging()
    flags = (("prog_bar", True),)
    replay(
        module,
        {
            Key("log", "loss", flags=flags): (number(0.5, torch.float64), 12.0),
            Key("log", "top", 0, "max", torch.bfloat16): (number(3.0, torch.float64), 0.25),
            Key("metric", "m", flags=(("metric_attribute", "mean"),)): (number(1.0), 2.0),
            Key("output", "loss"): (number(1.0), 2.0),
        },
    )
    assert module.calls == [
        ("loss", (0.5, torch.float32), {"reduce_fx": "mean", "batch_size": 12, "prog_bar": True}),
        ("top", (3.0, torch.bfloat16), {"reduce_fx": "max", "batch_size": 0.25}),
        ("m", module.mean, {"batch_size": 1, "metric_attribute": "mean"}),
    ]


def test_outputs_are_returned_by_name_in_their_type():
    combined = {
        Key("output", "loss", dtype=torch.float32): (number(0.5, torch.float64), 1.0),
        Key("log", "a"): (number(1.0), 1.0),
    }
    assert outputs(combined) == {"loss": number(0.5)}
    assert outputs(combined)["loss"].dtype == torch.float32


def entries(**values):
    """Records by name: (reduction, value, weight)."""
    return {
        Key("log", name, 0, reduction): Entry([number(v)], [float(w)]) for name, (reduction, v, w) in values.items()
    }


def exchanged():
    rank = dist.get_rank()
    exchange, gathered, all_gather = Exchange(CPU), [], dist.all_gather_object
    dist.all_gather_object = lambda *args, **kwargs: (gathered.append(1), all_gather(*args, **kwargs))
    steps = [
        (
            entries(
                mean=("mean", 1.0 + rank, 1 + 2 * rank),
                sum=("sum", 10.0**rank, 1),
                top=("max", -5.0 - rank, 1),
                low=("min", -5.0 - rank, 1),
            ),
            (),
        ),
        (entries(**({"mine": ("mean", 7.0, 3)} if rank else {"other": ("max", -2.0, 1)})), ()),
        ({}, ()),
        (entries(weightless=("mean", math.nan, 0), mean=("mean", 3.0, 0 if rank else 2)), ()),
        (entries(mean=("mean", math.nan if rank else 1.0, 1), top=("max", math.nan if rank else 1.0, 1)), ()),
        (entries(mean=("mean", 5.0 + rank, 1), mine=("sum", 3.0, 1)), (1,)),
        (entries(only=("mean", 4.0, 2)) if rank == 0 else {}, (1,)),
    ]
    results = []
    for records, prefer in steps:
        before = len(gathered)
        combined, sums = exchange.combine(records, [rank + 1, number(float(rank))], prefer=prefer)
        found = {f"{key.name}-{key.reduction}": (value.item(), weight) for key, (value, weight) in combined.items()}
        results.append((found, sums, len(gathered) - before))
    dist.all_gather_object = all_gather
    return results


def test_records_are_combined_alike_on_all_ranks_whoever_recorded_them():
    first, second = run_ranks(2, exchanged)
    assert repr(first) == repr(second)  # as text: NaN is not equal to itself
    found = [result[0] for result in first]
    assert found[0] == {"mean-mean": (7 / 4, 4), "sum-sum": (11, 2), "top-max": (-5, 2), "low-min": (-6, 2)}
    assert found[1] == {"mine-mean": (7, 3), "other-max": (-2, 1)}
    assert found[2] == {}
    assert found[3] == {"mean-mean": (3, 2)}
    assert math.isnan(found[4]["mean-mean"][0])
    assert math.isnan(found[4]["top-max"][0])
    assert found[5] == {"mean-mean": (6, 1), "mine-sum": (3, 1)}  # rank 1 alone is asked
    assert found[6] == {"only-mean": (4, 2)}  # nobody who is preferred has it
    assert all(sums == [3, 1] for _, sums, _ in first)
    assert [objects for *_, objects in first] == [1, 1, 0, 1, 0, 1, 1]  # keys are learned once


def alone():
    combined, sums = Exchange(CPU).combine(entries(a=("mean", 3.0, 2)), [5])
    return {key.name: (value.item(), weight) for key, (value, weight) in combined.items()}, sums


def test_one_process_combines_with_nobody():
    assert run_ranks(1, alone) == [({"a": (3, 2)}, [5])]


def counted_once():
    rank = dist.get_rank()
    exchange = Exchange(CPU, counts=rank % 2 == 0)  # neighbours have made the same records
    keys = {how: Key("log", how, reduction=how) for how in ("mean", "sum", "max")}
    entries = {key: Entry([number(3.0 + rank // 2)], [2.0]) for key in keys.values()}
    combined, sums = exchange.combine(entries, [float(rank)])
    return {how: (combined[key][0].item(), combined[key][1]) for how, key in keys.items()}, sums


def test_records_that_ranks_of_a_tensor_group_make_alike_count_once_and_wishes_of_each_rank():
    for combined, sums in run_ranks(4, counted_once):
        assert combined == {"mean": (3.5, 4), "sum": (7, 2), "max": (4, 2)}
        assert sums == [6]
