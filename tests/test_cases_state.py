"""Cases 34-38: state that is saved by one run and loaded into another."""

import io

import pytest
import torch

from cases import BOTH, PARAMS, UNMANAGED, Dot, Mode, Run, agrees, empty_afterwards, expect, results
from ranks import run_ranks

SIZES = {"a": 5, "b": 52}
XS = {"a": torch.arange(1.0, 6), "b": torch.arange(6.0, 58)}


def through_a_file(state):
    """`state` as it comes back from disk; only tensors, numbers and strings can come back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_state_of_two_ranks_loads_into_any_number_of_ranks_stage_and_offload():
    """Every element keeps its own moments; the export holds 57 elements, no padding (case 34)."""
    after_four = {name: x * (1 - 0.9**4) for name, x in XS.items()}

    def train(run):
        zero = run.build(Dot(**SIZES), torch.optim.Adam, lr=0.1)
        for _ in range(3):
            run.window(XS)
        saved = through_a_file(zero.state_dict()), zero.model_state_dict()
        run.window(XS)
        return *saved, run.weights()

    every = results(train, 2)
    saved, exported, uninterrupted = every[0][2]
    for mode, rank, (state, model, weights) in every:
        assert agrees(state, saved), f"{mode}, rank {rank} saves something else"
        assert agrees(model, exported) and agrees(weights, uninterrupted)
    assert {name: t.numel() for name, t in exported.items()} == SIZES

    def go_on(run):
        zero = run.build(Dot(**SIZES), torch.optim.Adam, lr=0.7)  # the saved lr counts
        zero.load_state_dict(saved if run.rank == 0 else {})
        loaded = run.weights()
        run.window(XS)
        state = zero.state_dict()["state"]
        moments = {name: state[name]["exp_avg"] for name in SIZES}
        return loaded, run.weights(), moments, state["b"]["step"]

    wanted = exported, uninterrupted, after_four, 4.0
    for world in (1, 3):
        expect(go_on, world, wanted, rel=1e-6, modes=[m for m in PARAMS if not m.managed])
    for mode, rank, value in results(go_on, 2, [m for m in PARAMS if not m.managed]):
        assert agrees(value[:2], wanted[:2]), f"{mode}, rank {rank}: not the same bits"
        assert agrees(value[2:], wanted[2:], rel=1e-6), f"{mode}, rank {rank}: {value[2:]}"


def test_loaded_model_weights_reach_the_masters():
    """The next step starts from them, not from what was before (case 35)."""

    def train(run):
        zero = run.build(Dot(torch.bfloat16, w=4))
        zero.load_model_state_dict({"w": torch.full((4,), 5.0)} if run.rank == 0 else {})
        loaded = run.weights(), run.masters()
        run.window({"w": 1})
        return *loaded, run.weights(), run.masters()

    five, four = {"w": 5}, {"w": 4}
    expect(train, 2, (five, five, four, four), modes=PARAMS)


class PartlyFrozen(Dot):
    def __init__(self, a, b, c):
        super().__init__(a=torch.full((3,), a), b=torch.full((3,), b))
        self.b.requires_grad_(False)
        self.register_buffer("c", torch.tensor(c))


def test_frozen_parameters_and_buffers_come_back_too():
    """On all ranks, into a model with another start; what was frozen is (case 36)."""

    def train(run):
        saved = run.build(PartlyFrozen(1.0, 7.0, 9.0)).model_state_dict()
        saved = through_a_file(saved)
        run.zero.close()
        zero = run.build(PartlyFrozen(*torch.randn(3).tolist()))
        zero.load_model_state_dict(saved if run.rank == 0 else {})
        loaded = run.weights(), run.model.c, zero.model_state_dict()
        run.window({"a": 1, "b": 1})
        return *loaded, run.model.b.requires_grad, run.weights()

    whole = {"a": 1, "b": 7, "c": 9}
    wanted = {"a": 1, "b": 7}, 9, whole, False, {"a": 0, "b": 7}
    expect(train, 2, wanted, modes=PARAMS)


GRADIENTS = {f"p{i}": i + 1.0 for i in range(4)}


def in_two_groups(run, optimizer=torch.optim.Adam, lrs=(1.0, 0.1)):
    """p0..p3 of 1, 2, 3 and 4 elements, the groups interleaved."""
    model = Dot(**{f"p{i}": i + 1 for i in range(4)})
    groups = [
        {"params": [model.p0, model.p2], "lr": lrs[0]},
        {"params": [model.p1, model.p3], "lr": lrs[1]},
    ]
    return run.build(model, optimizer, param_groups=groups)


def test_state_of_interleaved_groups_goes_to_its_own_parameter():
    """By name and shape, on the way to another mode and back (case 37)."""
    elsewhere = Mode(3, "nvme", False, "nvme"), Mode(1, "cpu", True)

    def train(run):
        zero = in_two_groups(run)
        for _ in range(2):
            run.window(GRADIENTS)
        saved = through_a_file(zero.state_dict())
        run.window(GRADIENTS)
        uninterrupted = run.weights()
        for mode in (*elsewhere, run.mode):
            zero.close()
            now = Run(mode, run.rank, run.world, run.folder)
            zero = in_two_groups(now, lrs=(0.5, 0.5))
            zero.load_state_dict(saved)
            saved = through_a_file(zero.state_dict())
        moments = {name: saved["state"][name]["exp_avg"] for name in GRADIENTS}
        now.window(GRADIENTS)
        same = agrees(now.weights(), uninterrupted)
        zero.close()
        return same, moments, tuple(group["lr"] for group in zero.param_groups)

    moments = {f"p{i}": torch.full((i + 1,), (i + 1) * 0.19) for i in range(4)}
    expect(train, 2, (True, moments, (1.0, 0.1)), rel=1e-6, modes=UNMANAGED)


TIER = {"none": "device", "cpu": "host", "nvme": "nvme"}


@pytest.mark.parametrize(
    ("first", "then"), [("none", "cpu"), ("cpu", "none"), ("cpu", "nvme"), ("nvme", "none")]
)
def test_loaded_state_lives_where_the_loading_optimizer_keeps_it(first, then):
    """And gives the same numbers there (case 38)."""

    def train(rank, world, folder):
        return [one(Run(Mode(s, first, m), rank, world, folder)) for s in (1, 2, 3) for m in BOTH]

    def one(run):
        zero = run.build(Dot(torch.bfloat16, w=2048), torch.optim.Adam, lr=0.1)
        run.window({"w": 1})
        saved = zero.state_dict()
        run.window({"w": 2})
        wanted = run.masters()
        zero.close()
        run.mode = Mode(run.mode.stage, then, run.managed)
        zero = run.build(Dot(torch.bfloat16, w=2048), torch.optim.Adam, lr=0.1)
        zero.load_state_dict(saved)
        held = {tier: bytes_of["optimizer"] for tier, bytes_of in zero.memory().items()}
        run.window({"w": 2})
        same = agrees(run.masters(), wanted)
        zero.close()
        return same, held

    # Master and two moments in FP32: 12 bytes for each of the 1024 elements of a slice.
    held = dict.fromkeys(TIER.values(), 0) | {TIER[then]: 12 * 1024}
    with empty_afterwards() as folder:
        for result in run_ranks(train, 2, folder):
            assert result == [(True, held)] * 6
