"""Memory that kept arguments are dealt out into; tests/callbacks/test_activation_recompute.py deals them out."""

import torch

from lightning_hybrid.parallel.memory.partitioned import ContiguousBuffers


def test_slots_lie_side_by_side_and_those_of_other_sizes_do_not_pile_up():
    buffers, cpu = ContiguousBuffers(), torch.device("cpu")

    def step(*numbers):
        slots = [buffers.take(cpu, torch.float32, number) for number in numbers]
        for slot in slots:
            buffers.give(slot)
        buffers.settle()
        return {slot.untyped_storage().data_ptr() for slot in slots}

    step(6, 6, 4)
    assert len(step(6, 6, 4)) == 1
    for number in range(7, 40):
        step(number, 6, 6, 6)
    assert sum(slot.numel() for slots in buffers._free.values() for slot in slots) == 6 + 6 + 4
    assert set(map(len, buffers._free.values())) == {1, 2}
    assert len(step(6, 6, 4)) == 1
