"""Drawn at random: a small model, how it is split and trained, and where its state lives. After
each window, gradients, norm and weights are compared with one plain process on the whole batch.

PROPERTY_EXAMPLES=1000 pytest tests/test_properties.py      looks at more than the suite does, and
                                                            makes a failure as small as it can
"""

import contextlib
import math
import os
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from models import STAGES
from offload import Offload
from ranks import run_ranks

EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "15"))
PHASES = [Phase.generate] + ([Phase.shrink] if "PROPERTY_EXAMPLES" in os.environ else [])
EPS = torch.finfo(torch.float32).eps
BETA1, BETA2, ADAM_EPS, MOMENTUM = 0.9, 0.999, 1e-8, 0.9


# What is drawn


@dataclass
class Layer:
    """One step of the chain, from `width` to `out`. A layer that keeps the width may be skipped."""

    kind: str  # linear, scale (0-dim), again (the layer before once more), empty, frozen
    width: int
    out: int
    dtype: torch.dtype


@dataclass
class Engine:
    stage: int
    offload: str
    offload_param: str
    sub_group_size: int
    buffer_count: int
    bucket: int
    overlap: bool
    leaf: bool


@dataclass
class Window:
    calls: list = field(default_factory=list)  # per call and rank: (rows, layers to skip)
    end: str = "step"  # step, finalize, drop, poison
    move_to: Engine | None = None  # afterwards, everything goes on in another engine


@dataclass
class Case:
    world: int
    layers: list
    checkpointed: str
    group_of: list  # per parameter: 0, 1, or 2 for none
    engine: Engine
    managed: bool
    optimizer: str
    clip: float | None
    scale: float | str
    plain_backward: bool
    windows: list


@st.composite
def engines(draw):
    stage = draw(st.sampled_from([1, 2, 3]))
    places = ["none", "cpu", "cpu-device", "nvme", "nvme-device"]
    return Engine(
        stage,
        offload=draw(st.sampled_from(places)),
        offload_param=draw(st.sampled_from(["none", "cpu", "nvme"])) if stage == 3 else "none",
        sub_group_size=draw(st.sampled_from([1, 7, 16, 1000])),
        buffer_count=draw(st.integers(1, 3)),
        bucket=draw(st.sampled_from([1, 10, 33, 100, 10000])),
        overlap=draw(st.booleans()),
        leaf=draw(st.booleans()) if stage == 3 else False,
    )


@st.composite
def chains(draw, low):
    """Layers one after the other; `low` is the model's precision or None for a mixture."""
    layers, width = [], 4
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["linear", "linear", "scale", "again", "empty", "frozen"]))
        out = draw(st.integers(1, 6)) if kind in ("linear", "frozen") else width
        dtype = low or draw(st.sampled_from([torch.float32, torch.bfloat16]))
        layers.append(Layer(kind, width, out, dtype))
        width = out
    layers.append(Layer("linear", width, 3, low or torch.float32))
    return layers


@st.composite
def windows(draw, case_world, layers, managed, count, diverge, may_move):
    found = []
    skippable = [i for i, layer in enumerate(layers) if layer.width == layer.out]
    calls = draw(st.integers(1, 3)) if managed else None
    for _ in range(count):
        window = Window()
        for _ in range(calls or draw(st.integers(1, 3))):
            skips = st.sets(st.sampled_from(skippable)) if skippable else st.just(set())
            same = draw(skips)
            window.calls.append(
                [
                    (draw(st.integers(1, 3)), frozenset(draw(skips) if diverge else same))
                    for _ in range(case_world)
                ]
            )
        ends = ["step", "step", "finalize", "poison"] + ([] if managed else ["drop"])
        window.end = draw(st.sampled_from(ends))
        if may_move and draw(st.integers(0, 3)) == 0:
            window.move_to = draw(engines())
        found.append(window)
    return found


@st.composite
def cases(draw):
    world = draw(st.integers(1, 3))
    low = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16, None]))
    layers, engine, managed = draw(chains(low)), draw(engines()), draw(st.booleans())
    # Branches that only some ranks take are for engines that keep the model whole.
    diverge, may_move = engine.stage != 3 and draw(st.booleans()), draw(st.booleans())
    may_move = may_move and not diverge
    found = draw(windows(world, layers, managed, 3, diverge, may_move))
    scale = draw(st.sampled_from([1.0, 1.0, 64.0, "dynamic"]))
    once = all(len(w.calls) == 1 for w in found)
    return Case(
        world=world,
        layers=layers,
        checkpointed=draw(st.sampled_from(["no", "no", "not reentrant", "reentrant"])),
        group_of=draw(st.lists(st.sampled_from([0, 0, 1, 1, 2]), min_size=12, max_size=12)),
        engine=engine,
        managed=managed,
        optimizer=draw(st.sampled_from(["SGD", "AdamW"])),
        clip=draw(st.sampled_from([None, 0.05, 1000.0])),
        scale=scale,
        plain_backward=scale == 1.0 and (once or not managed) and draw(st.booleans()),
        windows=found,
    )


# The model


class Chain(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.case, self.steps = case, nn.ModuleList()
        for i, layer in enumerate(case.layers):
            self.steps.append(self.build(layer, i))

    def build(self, layer, index):
        if layer.kind == "again" and index:
            return self.steps[index - 1] if self.keeps_width(index - 1) else nn.Identity()
        if layer.kind == "scale":
            return Scale().to(layer.dtype)
        if layer.kind == "empty":
            return Empty(layer.width).to(layer.dtype)
        if layer.kind == "again":
            return nn.Identity()
        linear = nn.Linear(layer.width, layer.out, dtype=layer.dtype)
        return linear.requires_grad_(layer.kind != "frozen")

    def keeps_width(self, index):
        return self.case.layers[index].width == self.case.layers[index].out

    def forward(self, x, skip):
        for i, step in enumerate(self.steps):
            if i not in skip:
                x = self.run(step, x)
        return x.float().square().mean()

    def run(self, step, x):
        dtype = next((p.dtype for p in step.parameters()), x.dtype)
        x = x.to(dtype)
        if self.case.checkpointed != "no" and x.requires_grad:
            reentrant = self.case.checkpointed == "reentrant"
            return torch.tanh(checkpoint(step, x, use_reentrant=reentrant))
        return torch.tanh(step(x))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(()) + 0.5)

    def forward(self, x):
        return x * self.scale


class Empty(nn.Module):
    """Takes part in the loss, and has no element."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, width))

    def forward(self, x):
        return torch.cat([x, nn.functional.linear(x, self.weight)], 1)


def groups_of(case, model):
    """Some parameters in each of two groups, some in none; the first is always in one."""
    groups = [{"params": [], "lr": 0.1}, {"params": [], "lr": 0.02, "weight_decay": 0.0}]
    for i, p in enumerate(model.parameters()):
        place = case.group_of[i % len(case.group_of)] if i else 0
        if place < 2:
            groups[place]["params"].append(p)
    return groups


def batch(rank, window, call, rows, poison):
    seed = 1 + rank + 10 * call + 100 * window
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    if poison:
        x[0, 0] = math.nan
    return x.requires_grad_()


# The plain side


class Truth:
    """One process that runs every rank's batches and sums in FP64, with FP32 masters.

    The weights are taken over from the engine after every window: each window is judged by itself,
    so that a last bit of one does not grow into the next.
    """

    def __init__(self, case, model):
        self.case, self.model = case, model
        options = {id(p): g for g in groups_of(case, model) for p in g["params"]}
        self.options = {n: options[id(p)] for n, p in model.named_parameters() if id(p) in options}
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.masters = {
            n: p.detach().float().clone() for n, p in trainable.items() if n in self.options
        }
        self.state = {n: {} for n in self.masters}
        self.window = 0
        for name, p in trainable.items():
            p.register_post_accumulate_grad_hook(lambda p, name=name: self.take(name, p))

    def take(self, name, p):
        if name in self.masters:
            self.sums[name] = self.sums.get(name, 0) + p.grad.double()
        p.grad = None

    def gradient(self, window, scale):
        """{name: the mean over ranks of the sum over calls}, of what got one."""
        self.sums = {}
        divisor = len(window.calls) if self.case.managed else 1
        for call, ranks in enumerate(window.calls):
            for rank, (rows, skip) in enumerate(ranks):
                bad = is_bad(window, rank, call, self.case.world)
                x = batch(rank, self.window, call, rows, bad)
                loss = self.model(x, skip) / divisor
                (loss if scale == 1.0 else loss * scale).backward()
        return {n: g / self.case.world / scale for n, g in self.sums.items()}

    def check_window(self, found, gradient, what):
        """Requires the engine's masters and moments to be one update from the last ones."""
        norm = math.sqrt(sum(g.square().sum().item() for g in gradient.values()))
        clip = self.case.clip / (norm + 1e-6) if self.case.clip else 1.0
        for name, old in self.masters.items():
            new, state = found["master"][name], found["state"].get(name, {})
            if name not in gradient:
                assert torch.equal(new, old), f"{what}: {name} moved without a gradient"
                same = self.state[name].keys() == state.keys()
                assert same, f"{what}: {name} has other state without a gradient"
                continue
            update = self.adamw if self.case.optimizer == "AdamW" else self.sgd
            update(name, old, new, state, gradient[name] * min(clip, 1.0), norm, what)

    def sgd(self, name, old, new, state, gradient, norm, what):
        options = self.options[name]
        decayed = gradient + options.get("weight_decay", 0.01) * old.double()
        before = self.state[name].get("momentum_buffer")
        moment = decayed if before is None else MOMENTUM * before.double() + decayed
        self.near(state["momentum_buffer"], moment, norm, f"{what}: momentum of {name}", old)
        wanted = old.double() - options["lr"] * state["momentum_buffer"].double()
        self.near(new, wanted, 0, f"{what}: {name}", old)

    def adamw(self, name, old, new, state, gradient, norm, what):
        options, before = self.options[name], self.state[name]
        m, v = (before.get(k, torch.zeros(())).double() for k in ("exp_avg", "exp_avg_sq"))
        first = BETA1 * m + (1 - BETA1) * gradient
        second = BETA2 * v + (1 - BETA2) * gradient.square()
        self.near(state["exp_avg"], first, norm, f"{what}: exp_avg of {name}", m)
        self.near(state["exp_avg_sq"], second, norm**2, f"{what}: exp_avg_sq of {name}", v)
        step = float(before.get("step", 0)) + 1  # not in FP32: 1 - BETA2**step is small
        assert state["step"] == step, f"{what}: step of {name} is {state['step']}, wanted {step}"
        # From the engine's own moments: Adam makes a full step of a gradient that is only noise.
        first, second = (state[k].double() for k in ("exp_avg", "exp_avg_sq"))
        size = (second / (1 - BETA2**step)).sqrt() + ADAM_EPS
        decayed = old.double() * (1 - options["lr"] * options.get("weight_decay", 0.01))
        moved = options["lr"] * first / (1 - BETA1**step) / size
        self.near(new, decayed - moved, 0, f"{what}: {name}", old, moved)

    def near(self, found, wanted, scale, what, *terms):
        """1e-6 of the gradient, and a few roundings of the numbers that were added."""
        assert found.shape == wanted.shape, f"{what}: {found.shape}, wanted {wanted.shape}"
        sizes = sum(t.double().norm().item() for t in (wanted, *terms))
        apart = (found.double() - wanted).norm().item()
        assert apart <= 1e-6 * scale + 8 * EPS * sizes, f"{what}: off by {apart:g} of {sizes:g}"

    def adopt(self, found, full):
        for name in self.masters:
            self.masters[name] = found["master"][name].clone()
            self.state[name] = dict(found["state"].get(name, {}))
        for name, p in self.model.named_parameters():
            assert full[name].dtype == p.dtype, name
            wanted = self.masters[name].to(p.dtype) if name in self.masters else p.detach()
            assert torch.equal(full[name], wanted), f"{name} is not its master, rounded"
            p.data.copy_(full[name])


def is_bad(window, rank, call, world):
    """A NaN comes in the last call, on the last rank only."""
    return window.end == "poison" and rank == world - 1 and call == len(window.calls) - 1


# The engine's side


def make(case, engine, model, folder):
    def tier(kind, **options):
        device, *rest = kind.split("-")
        if device == "none":
            return None
        return Offload(
            device,
            nvme_path=folder,
            accumulate_on="device" if rest else "host",
            sub_group_size=engine.sub_group_size,
            buffer_count=engine.buffer_count,
        )

    options = {"momentum": MOMENTUM} if case.optimizer == "SGD" else {}
    if engine.stage == 3:
        options["offload_param"] = tier(engine.offload_param)
        options["leaf_modules"] = (nn.ModuleList,) if engine.leaf else ()
    return STAGES[engine.stage](
        model,
        getattr(torch.optim, case.optimizer),
        groups_of(case, model),
        managed_gradient_accumulation=case.managed,
        gradient_accumulation_steps=len(case.windows[0].calls) if case.managed else 1,
        gradient_clipping=case.clip,
        loss_scale=case.scale,
        **(
            {"initial_loss_scale": 2.0**8, "loss_scale_window": 2}
            if case.scale == "dynamic"
            else {}
        ),
        reduce_bucket_size=engine.bucket,
        overlap_comm=engine.overlap and (case.managed or engine.stage > 1),
        offload_optimizer=tier(engine.offload),
        lr=0.05,
        weight_decay=0.01,
        **options,
    )


def run_window(case, zero, model, rank, index):
    window = case.windows[index]
    for call, ranks in enumerate(window.calls):
        rows, skip = ranks[rank]
        loss = model(batch(rank, index, call, rows, is_bad(window, rank, call, case.world)), skip)
        loss.backward() if case.plain_backward else zero.backward(loss)
        if window.end == "finalize" and (not case.managed or call == len(window.calls) - 1):
            zero.finalize_gradient_accumulation_boundary()
        if window.end == "drop" and call == len(window.calls) - 1:
            zero.zero_grad()
        elif case.managed:
            zero.step()
    if not case.managed:
        zero.step()


def check_case(rank, world, case, folder):
    torch.manual_seed(0)
    plain = Chain(case)
    torch.manual_seed(rank)
    model = Chain(case)
    truth, zero = Truth(case, plain), None
    with contextlib.ExitStack() as stack:
        zero = stack.enter_context(make(case, case.engine, model, folder))
        for index, window in enumerate(case.windows):
            what, truth.window, before = f"window {index}", index, zero.state_dict()
            gradient = truth.gradient(window, zero.loss_scale)
            run_window(case, zero, model, rank, index)
            found, full = zero.state_dict(), zero.model_state_dict()
            norm = math.sqrt(sum(g.square().sum().item() for g in gradient.values()))
            dropped = window.end == "drop" or not gradient
            if dropped or not math.isfinite(norm):
                assert not zero.was_step_applied(), what
                assert zero.skipped_steps == before["skipped_steps"] + (not dropped), what
                check_same(before, found, what)
            else:
                assert zero.was_step_applied(), what
                apart = abs(zero.global_grad_norm - norm)
                assert apart <= 1e-6 * norm, f"{what}: norm {zero.global_grad_norm}, not {norm}"
                truth.check_window(found, gradient, what)
            truth.adopt(found, full)
            if window.move_to is not None:
                torch.manual_seed(100 + rank)
                model = Chain(case)
                zero = stack.enter_context(make(case, window.move_to, model, folder))
                zero.load_model_state_dict(full)
                zero.load_state_dict(found if rank == 0 else {})
                check_same(found, zero.state_dict(), f"{what}, moved")


def check_same(before, after, what):
    for part in ("master", "state"):
        assert before[part].keys() == after[part].keys(), f"{what}: {part}"
    for name, master in before["master"].items():
        assert torch.equal(master, after["master"][name]), f"{what}: {name} moved"
    for name, state in before["state"].items():
        for kind, value in state.items():
            same = torch.equal(*map(torch.as_tensor, (value, after["state"][name][kind])))
            assert same, f"{what}: {kind} of {name} changed"


@settings(
    max_examples=EXAMPLES,
    phases=PHASES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(case=cases())
def test_whatever_is_drawn_trains_as_one_plain_process_does(tmp_path, case):
    note(str(case))
    run_ranks(check_case, case.world, case, str(tmp_path))
