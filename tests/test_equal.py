"""Every stage, tier and mode trains as one plain process does on the whole batch, after every step;
and what is promised to be the same computation is the same to the last bit."""

import itertools

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from models import (
    HOMES,
    SGD,
    AdamW,
    Dot,
    Odd,
    assert_same,
    build,
    copied,
    distance,
    named,
    param_groups,
    recording,
    rows,
)
from ranks import all_raise, assert_same_everywhere, run_ranks

CALLS, STEPS, CLIP = 3, 3, 0.2  # thirds: a division that rounds
OPTIMIZERS = {
    "sgd": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "adamw": (AdamW, {"lr": 0.05, "weight_decay": 0.1}),
}
MODES = (True, False)  # managed, unmanaged


def new_model(seed=0):
    torch.manual_seed(seed)
    return Odd()


def loss_of(model, x):
    return model(x).square().mean()


def train(rank, stage, folder, optimizer, managed=True, clip=CLIP, **options):
    """The state, the norm and the whole model after each step."""
    optimizer_class, numbers = OPTIMIZERS[optimizer]
    model = new_model(rank)  # from a seed of the rank's own: rank 0's weights are to be taken
    if managed:
        options["gradient_accumulation_steps"] = CALLS
    zero = build(
        stage,
        model,
        folder,
        recording(optimizer_class),
        param_groups=param_groups(model),
        managed_gradient_accumulation=managed,
        gradient_clipping=clip,
        **numbers,
        **options,
    )
    seen = []
    with zero:
        for step in range(STEPS):
            for call in range(CALLS):
                loss = loss_of(model, rows(rank, step * CALLS + call))
                zero.backward(loss if managed else loss / CALLS)
                if managed:
                    zero.step()
            if not managed:
                zero.step()
            seen.append((zero.state_dict(), zero.global_grad_norm, zero.model_state_dict()))
    return seen


class Plain:
    """One plain process, the plain optimizer, the whole batch in one backward."""

    def __init__(self, world, optimizer, clip=CLIP):
        optimizer_class, numbers = OPTIMIZERS[optimizer]
        self.world, self.clip, self.model = world, clip, new_model()
        self.optimizer = optimizer_class(param_groups(self.model), **numbers)

    def backward(self, step):
        """Leaves the clipped gradients in the parameters; returns the norm before clipping."""
        calls = range(step * CALLS, (step + 1) * CALLS)
        batch = torch.cat([rows(r, i) for r, i in itertools.product(range(self.world), calls)])
        self.optimizer.zero_grad()
        loss_of(self.model, batch).backward()
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip).item()

    @torch.no_grad()
    def set(self, weights):
        for name, param in named(self.model).items():
            param.copy_(weights[name])


def assert_near(ours, truth, tolerance, what):
    """Requires every tensor to be within `tolerance` of the truth's norm. Not of each element: one
    that is nothing but the rounding of a sum that cancels has no digit to agree on."""
    for name in truth:
        far, size = (ours[name] - truth[name]).norm().item(), truth[name].norm().item()
        assert far <= tolerance * size, f"{what}, {name}: off by {far / size:.2g} of itself"


def check_gradients(seen, world, optimizer):
    """Every gradient is that of a plain process that has got the same weights."""
    plain, weights = Plain(world, optimizer), named(new_model())
    clipped = 0
    for step, (state, norm, _) in enumerate(seen):
        plain.set(weights)
        wanted = plain.backward(step)
        truth = {n: p.grad for n, p in named(plain.model).items()}
        assert norm == pytest.approx(wanted, rel=1e-6), f"norm of step {step}"
        ours = {n: s["given"] for n, s in state["state"].items()}
        assert_near(ours, truth, 1e-6, f"gradient of step {step}")
        weights = state["master"]
        clipped += wanted > CLIP
    assert clipped, "clipping was never due, so it is not tested"


def check_updates(seen, world, optimizer):
    """Every update is, to the last bit, what the plain optimizer makes of those gradients."""
    plain = Plain(world, optimizer)
    for step, (state, _, whole) in enumerate(seen):
        for name, param in named(plain.model).items():
            param.grad = state["state"][name]["given"].clone()
        plain.optimizer.step()
        assert_same(copied(named(plain.model)), state["master"], f"weights after step {step}")
        for name, param in named(plain.model).items():
            truth, ours = dict(plain.optimizer.state[param]), dict(state["state"][name])
            del ours["given"]
            assert float(truth.pop("step", 0)) == float(ours.pop("step", 0)), name
            assert_same(dict(sorted(truth.items())), dict(sorted(ours.items())), name)
        everything = copied(dict(plain.model.state_dict()))  # frozen ones and buffers: rank 0's
        assert_same(everything, dict(whole), f"model after step {step}")


def check_path(seen, world, optimizer):
    """A plain process that goes its own way stays beside ours. Adam divides gradients by their own
    size, also those that are mostly rounding, so its error is measured against the way it goes."""
    plain, start = Plain(world, optimizer), copied(named(new_model()))
    for step, (state, _, _) in enumerate(seen):
        plain.backward(step)
        plain.optimizer.step()
        truth = copied(named(plain.model))
        if optimizer == "sgd":
            assert_near(state["master"], truth, 1e-6, f"weights after step {step}")
        share = distance(state["master"], truth) / distance(truth, start)
        assert share <= 1e-5, f"step {step}: off the way by {share:.2g} of it"


def check(seen, world, optimizer):
    check_gradients(seen, world, optimizer)
    check_updates(seen, world, optimizer)
    check_path(seen, world, optimizer)


def assert_all_same(configurations, world, optimizer, run):
    """Requires run(rank, **configuration) to give the same bits on all ranks for all of the
    configurations, and the plain computation's numbers."""

    def work(rank, world):
        first = None
        for configuration in configurations:
            seen = run(rank, **configuration)
            first = first or seen
            assert_same(first, seen, f"{configurations[0]} and {configuration}")
        if rank == 0 and optimizer:
            check(first, world, optimizer)
        return first

    return assert_same_everywhere(run_ranks(work, world))


def product(**choices):
    """[{name: choice}]: every combination."""
    return [
        dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())
    ]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_tiers_and_modes_give_the_bits_that_are_the_plain_numbers(world, stage, tmp_path):
    def run(rank, **configuration):
        return train(rank, stage, tmp_path, "adamw", reduce_bucket_size=120, **configuration)

    assert_all_same(product(home=HOMES, managed=MODES), world, "adamw", run)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_momentum_is_kept_as_well_as_the_moments_of_adam(stage, tmp_path):
    def run(rank, **configuration):
        return train(rank, stage, tmp_path, "sgd", reduce_bucket_size=120, **configuration)

    assert_all_same(product(home=HOMES, managed=MODES), 2, "sgd", run)


def test_where_stage_3_keeps_its_slices_changes_no_bit(tmp_path):
    def run(rank, **configuration):
        return train(rank, 3, tmp_path, "adamw", reduce_bucket_size=120, **configuration)

    configurations = [{}, *product(weights=("cpu", "nvme"), home=HOMES)]
    configurations += [{"weights": home, "home": home, "managed": False} for home in HOMES[1:]]
    assert_all_same(configurations, 2, "adamw", run)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_overlap_and_where_a_window_is_summed_change_no_bit(stage, tmp_path):
    def run(rank, **configuration):
        return train(rank, stage, tmp_path, "adamw", reduce_bucket_size=120, **configuration)

    overlap = product(overlap_comm=(False, True), managed=MODES)
    if stage == 1:  # which refuses to overlap with a backward that it does not know to be the last
        overlap.remove({"overlap_comm": True, "managed": False})
    sums = [{"accumulate_on": "device"}, {"accumulate_on": "host"}]
    sums = product(home=("cpu", "nvme"), settings=sums)
    sums += product(home=["nvme"], settings=[{"accumulate_on": "device"}], managed=[False])
    assert_all_same(overlap + sums, 2, "adamw", run)


@pytest.mark.parametrize("stage", [1, 3])  # the update is stage 2's too
def test_cutting_the_update_into_groups_changes_no_bit(stage, tmp_path):
    def run(rank, **configuration):
        return train(rank, stage, tmp_path, "adamw", reduce_bucket_size=120, **configuration)

    cuts = [
        {"sub_group_size": size, "buffer_count": count, "accumulate_on": where}
        for size, count, where in (
            (5, 4, "host"),
            (17, 1, "device"),
            (17, 2, "host"),
            (50, 3, "device"),
        )
    ]
    configurations = [{}, *product(home=["nvme"], settings=cuts)]
    configurations += product(home=["cpu"], settings=cuts[:2])
    assert_all_same(configurations, 2, "adamw", run)


@pytest.mark.parametrize("size", [1, 10**6])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_buckets_of_any_size_give_the_plain_numbers(stage, size, tmp_path):
    def run(rank, home):
        return train(rank, stage, tmp_path, "sgd", reduce_bucket_size=size, home=home)

    assert_all_same([{"home": "nvme"}], 3, "sgd", run)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_clipping_the_size_of_buckets_changes_no_bit(stage, tmp_path):
    def run(rank, size, clip=None):
        seen = train(rank, stage, tmp_path, "adamw", reduce_bucket_size=size, clip=clip)
        return [(state, whole) for state, _, whole in seen]  # norms are added up by bucket

    never_due = {"size": 120, "clip": 1e6}
    assert_all_same([*product(size=(120, 1, 50, 10**6)), never_due], 2, None, run)


def train_ddp(rank, optimizer):
    """DDP with the plain optimizer; the model after each step."""
    optimizer_class, numbers = OPTIMIZERS[optimizer]
    model = new_model(rank)
    ddp = DistributedDataParallel(model)
    plain = optimizer_class(param_groups(model), **numbers)
    seen = []
    for step in range(STEPS):
        with ddp.no_sync():
            for call in range(CALLS - 1):
                (loss_of(ddp, rows(rank, step * CALLS + call)) / CALLS).backward()
        (loss_of(ddp, rows(rank, step * CALLS + CALLS - 1)) / CALLS).backward()
        plain.step()
        plain.zero_grad()
        seen.append(copied(model.state_dict()))
    return seen


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world", [1, 2])
def test_stage_1_gives_the_bits_of_ddp(world, optimizer, tmp_path):
    def work(rank, world):
        truth = train_ddp(rank, optimizer)
        configurations = product(home=HOMES, managed=MODES, reduce_bucket_size=[50], clip=[None])
        configurations += product(clip=(None, 1e6))  # the latter is never due
        for options in configurations:
            seen = train(rank, 1, tmp_path, optimizer, **options)
            assert_same(truth, [dict(whole) for _, _, whole in seen], f"DDP and {options}")
        return truth

    assert_same_everywhere(run_ranks(work, world))


def test_construction_takes_rank_0s_weights_and_buffers(tmp_path):
    def work(rank, world):
        taken = []
        for stage, home in itertools.product((1, 2, 3), ("none", "nvme")):
            model = new_model(rank)
            with build(stage, model, tmp_path, home=home, reduce_bucket_size=50) as zero:
                taken.append(copied(zero.model_state_dict()))
                with zero.gathered():
                    taken.append(copied(model.state_dict()))
            taken.append(copied(model.state_dict()))  # what close() leaves behind
        wanted = copied(new_model(0).state_dict())
        for i, values in enumerate(taken):
            assert_same(wanted, values, f"reading {i}")

    run_ranks(work, 3)


def test_the_same_seed_gives_the_same_bits_run_after_run(tmp_path):
    def work(rank, world):  # three ranks: with two, every order of addition is the same
        options = {"home": "nvme", "reduce_bucket_size": 120}
        return [train(rank, stage, tmp_path, "adamw", **options) for stage in (1, 2, 3)]

    first, second = (assert_same_everywhere(run_ranks(work, 3)) for _ in range(2))
    assert_same(first, second, "two runs")


@pytest.mark.parametrize("name", ["gradient", "master"])
def test_an_optimizer_may_call_its_state_what_it_likes(name, tmp_path):
    def work(rank, world):
        for stage, home, where in itertools.product((1, 2, 3), HOMES, ("host", "device")):
            model = Dot(start=7.0)
            options = {"settings": {"accumulate_on": where}, "lr": 1.0}
            with build(stage, model, tmp_path, recording(SGD, name), home, **options) as zero:
                for step in range(1, 4):
                    zero.backward(model(torch.full((5,), float(step))))
                    zero.step()
                state = zero.state_dict()
            assert state["master"]["w"].tolist() == [7.0 - 1 - 2 - 3] * 5, (
                f"stage {stage}, {home}, {where}"
            )
            assert state["state"]["w"][name].tolist() == [3.0] * 5, (
                f"stage {stage}, {home}, {where}"
            )

    run_ranks(work, 2)


class Watched(AdamW):
    """Notes which implementation each update runs with."""

    fused = None

    def step(self, closure=None):
        type(self).fused = {group["fused"] for group in self.param_groups}
        return super().step(closure)


def test_fused_reaches_the_update_only_if_it_is_asked_for(tmp_path):
    def work(rank, world):
        for stage, home, fused in itertools.product((1, 2, 3), HOMES, (True, False, None)):
            model, options = new_model(), {} if fused is None else {"fused": fused}
            with build(stage, model, tmp_path, Watched, home, lr=0.05, **options) as zero:
                Watched.fused = None
                zero.backward(loss_of(model, rows(rank, 0)))
                zero.step()
            assert {fused} == Watched.fused, f"stage {stage}, {home}, {fused}: {Watched.fused}"

    run_ranks(work, 2)


def test_a_fused_update_gives_the_plain_numbers(tmp_path):
    def work(rank, world):
        for stage, home in itertools.product((1, 2, 3), ("none", "nvme")):
            seen = train(rank, stage, tmp_path, "adamw", home=home, fused=True)
            check_gradients(seen, world, "adamw")
            check_path(seen, world, "adamw")

    run_ranks(work, 2)


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_that_keep_parameters_whole_refuse_to_offload_them(stage, tmp_path):
    def work(rank, world):
        build(stage, new_model(), tmp_path, weights="cpu")

    all_raise(work, 2, ValueError, "offload_param")
