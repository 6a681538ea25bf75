"""Predictions reach every rank once for each sample, in the order of the data, whatever the layout."""

import warnings

import numpy
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import DataLoader, IterableDataset

from tests.launch import run_trainers
from tests.small import LAYOUTS, Small, hybrid, samples, trainer_of


class Predicting(Small):
    """Returns what users return: tensors, lists of things, constants."""

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        output = self(x)
        return {
            "output": output,
            "pair": (output.squeeze(1), y),
            "each": [{"value": value, "length": 1} for value in y.flatten().tolist()],
            "loader": dataloader_idx,
            "none": None,
        }


class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.batches, self.epochs = [], []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.batches.append((prediction, batch_indices, batch_idx, dataloader_idx))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.epochs.append((predictions, batch_indices))


def predicted(layout, numbers, **options):
    """What predicting loaders of these numbers of samples returns, and what a writer is given."""
    pipeline, data, chunks = layout or (1, 1, 1)
    writer, module = Writer(), Predicting()
    module.train()
    module.blocks[1].eval()
    trainer = trainer_of(hybrid(pipeline, chunks) if layout else "auto", callbacks=[writer], **options)
    loaders = [DataLoader(samples(number, seed=number), 4 // data) for number in numbers]
    result = trainer.predict(module, loaders if len(loaders) > 1 else loaders[0])
    modes = [child.training for child in module.children()], [block.training for block in module.blocks]
    assert modes == ([True, True, True], [True, False, True, True, True, True])
    return result, writer.batches, writer.epochs


def all_cases(layout):
    return [predicted(layout, numbers) for numbers in ([7], [8], [5], [7, 3, 4])]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_predictions_are_those_of_one_process(layout):
    expected = all_cases(None)
    assert [indices for _, indices, _, _ in expected[0][1]] == [[0, 1, 2, 3], [4, 5, 6]]
    for rank, found in enumerate(run_trainers(layout[0] * layout[1], all_cases, layout)):
        for (result, batches, epochs), (one_result, one_batches, one_epochs) in zip(found, expected, strict=True):
            torch.testing.assert_close(result, one_result)
            torch.testing.assert_close(batches, one_batches if rank == 0 else [])
            torch.testing.assert_close(epochs, one_epochs if rank == 0 else [])


def limited(layout):
    results = [predicted(layout, [8], limit_predict_batches=1)[0]]
    module, loader = Predicting(), DataLoader(samples(6), 2)
    results.append(trainer_of(hybrid(layout[0], layout[2])).predict(module, loader, return_predictions=False))
    return results


def test_limits_count_batches_of_a_replica_and_nothing_is_kept_that_nobody_wants():
    expected, _, _ = predicted(None, [8], limit_predict_batches=1)
    for found, nothing in run_trainers(4, limited, (2, 2, 1)):
        torch.testing.assert_close(found, expected)
        assert nothing is None


class Stream(IterableDataset):
    def __init__(self, trainer, number):
        self.trainer, self.dataset = trainer, samples(number)

    def __iter__(self):
        share = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        for index in range(share["rank"], len(self.dataset), share["num_replicas"]):
            yield self.dataset[index]


def streamed(layout):
    trainer = trainer_of(hybrid(layout[0], layout[2]))
    return [trainer.predict(Predicting(), DataLoader(Stream(trainer, number), 2)) for number in (7, 1)]


def test_streams_that_replicas_share_in_turn_are_joined_in_order():
    x, y = samples(7).tensors
    one = Predicting().predict_step((x, y), 0)["output"].detach()
    for seven, single in run_trainers(4, streamed, (2, 2, 1)):
        torch.testing.assert_close(torch.cat([batch["output"] for batch in seven]), one)
        torch.testing.assert_close(single[0]["output"][:, 0], Predicting()(samples(1).tensors[0])[:, 0].detach())
        assert len(single) == 1


class Scalar(Small):
    def predict_step(self, batch, batch_idx):
        return self(batch[0]).mean()


class Logs(Small):
    def predict_step(self, batch, batch_idx):
        self.log("mean", self(batch[0]).mean())


class Nothing(Small):
    """Without the batch's number among its arguments."""

    def predict_step(self, batch):
        self(batch[0])


def odd():
    loader, messages = DataLoader(samples(4), 4), []
    for model in (Scalar, Logs):
        with pytest.raises(ValueError, match="predict_step") as caught:
            trainer_of(hybrid()).predict(model(), loader)
        messages.append(str(caught.value))
    one = trainer_of(hybrid(microbatches=1)).predict(Scalar(), loader)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="predict returned None")  # which Lightning tells rank 0
        nothing = trainer_of(hybrid()).predict(Nothing(), loader)
    return messages, one, nothing


def test_what_cannot_be_joined_is_refused_on_every_rank():
    for (scalar, logs), one, nothing in run_trainers(2, odd):
        assert scalar.startswith("predict_step returned a tensor of shape [] for parts of a batch with [2, 2]")
        assert logs == "predict_step logs 'mean': Lightning has no log then."
        torch.testing.assert_close(one, [Small()(samples(4).tensors[0]).mean().detach()])
        assert nothing == [None]


def in_an_order(layout):
    """With a sampler of the user's, whose numbers are NumPy's."""
    writer, order = Writer(), numpy.array([5, 2, 7, 0, 1, 6, 3, 4])
    trainer = trainer_of(hybrid(*layout[::2]) if layout else "auto", callbacks=[writer])
    loader = DataLoader(samples(8), 4 // (layout[1] if layout else 1), sampler=list(order))
    return trainer.predict(Predicting(), loader), writer.batches, writer.epochs


def test_the_order_is_that_of_the_users_sampler():
    result, batches, epochs = in_an_order(None)
    for rank, (found, own_batches, own_epochs) in enumerate(run_trainers(4, in_an_order, (2, 2, 1))):
        torch.testing.assert_close(found, result)
        if rank == 0:
            torch.testing.assert_close(own_batches, batches)
            torch.testing.assert_close(own_epochs, epochs)


class Wrong(Small):
    """A mistake of the user's, in code that only the last stage runs with true values."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + undefined  # noqa: F821


def mistaken():
    with pytest.raises(Exception, match="undefined") as caught:
        trainer_of(hybrid()).fit(Wrong(), DataLoader(samples(8), 4))
    return type(caught.value).__name__, str(caught.value)


class Again(Small):
    """Feeds what it predicts to itself, as a language model that generates."""

    def predict_step(self, batch, batch_idx):
        x, _ = batch
        return self(x + self(x))


def predicts_again():
    trainer, module, data = trainer_of(hybrid()), Again(), DataLoader(samples(8), 4)
    trainer.fit(module, data)
    with pytest.raises(RuntimeError, match="inlet is called on a path that no earlier run took") as caught:
        trainer.predict(module, data)
    return str(caught.value)


def test_a_step_that_calls_a_cut_model_again_is_told_that_it_needs_one_stage():
    for message in run_trainers(2, predicts_again):
        assert "such as generate, needs pipeline_parallel_size=1" in message


def test_a_mistake_in_the_users_step_is_no_matter_of_the_cut():
    first, second = run_trainers(2, mistaken)
    assert second == ("NameError", "name 'undefined' is not defined")
    assert first[1].startswith("Rank 1 failed first: NameError: name 'undefined' is not defined")
