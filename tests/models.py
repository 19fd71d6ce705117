"""What the tests of the stages share: small models with their data, optimizers on every tier, and
the plain computation that they are held against."""

import itertools

import torch
from torch import nn

from offload import Offload
from ranks import assert_same_everywhere
from stage1 import ZeroStage1
from stage2 import ZeroStage2
from stage3 import ZeroStage3

STAGES = {1: ZeroStage1, 2: ZeroStage2, 3: ZeroStage3}
HOMES = ("none", "cpu", "nvme")  # where FP32 state lives
SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


class Odd(nn.Module):
    """295 trainable elements, in sizes that neither 2 nor 3 divide, and some that never move."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(7, 13), nn.Linear(13, 11), nn.Linear(11, 3)
        self.scale = nn.Parameter(torch.rand(()) + 0.5)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("shift", torch.randn(3))

    def forward(self, x):
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.scale * self.c(h) + self.frozen + self.shift


class Dot(nn.Module):
    """One backward of dot(x) gives the gradient x, whatever the weights are."""

    def __init__(self, size=5, start=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((size,), start))

    def forward(self, x):
        return (self.w * x).sum()


class Heads(nn.Module):
    """A body and two heads, of which a forward uses one."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 6)
        self.heads = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 3)})

    def forward(self, x, head):
        return self.heads[head](torch.tanh(self.body(x)))


def rows(rank, index, width=7, count=5):
    """The index-th micro-batch of a rank, (count, width)."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1000 * rank + index))


def param_groups(model):
    """Matrices, and with a learning rate and no weight decay of their own vectors and numbers."""
    params = [p for p in model.parameters() if p.requires_grad]
    matrices, rest = [p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]
    return [{"params": matrices}, {"params": rest, "lr": 0.02, "weight_decay": 0.0}]


def tier(kind, folder, **settings):
    """The Offload for "none", "cpu" or "nvme"."""
    return None if kind == "none" else Offload(kind, nvme_path=str(folder), **settings)


def build(stage, model, folder, optimizer=SGD, home="none", weights="none", settings=(), **options):
    """A stage's optimizer, its FP32 state at `home` and, in stage 3, slices of weights at
    `weights`, both with the same `settings`."""
    if weights != "none":
        options["offload_param"] = tier(weights, folder, **dict(settings))
    state = tier(home, folder, **dict(settings))
    return STAGES[stage](model, optimizer, offload_optimizer=state, **options)


def on_all_tiers(body, folder, stages=(1, 2, 3), homes=HOMES):
    """What a rank does to run body(make, rank) for every stage and home; make(model, ...) builds
    the optimizer there. A failure says where it was."""

    def work(rank, world):
        for stage, home in itertools.product(stages, homes):
            made = []

            def make(model, *args, stage=stage, home=home, made=made, **options):
                made.append(build(stage, model, folder, *args, home=home, **options))
                return made[-1]

            try:
                body(make, rank)
            except (Exception, AssertionError) as error:
                raise AssertionError(f"stage {stage}, offload {home}: {error}") from error
            for zero in made:  # after a failure nobody is left to close with
                zero.close()

    return work


def assert_same(one, other, what):
    """Requires equality to the last bit; `what` begins the message."""
    try:
        assert_same_everywhere([one, other])
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


def distance(one, other):
    """L2 distance between two {name: tensor}, in FP64."""
    return sum((one[n].double() - other[n].double()).square().sum() for n in one).sqrt().item()


def recording(optimizer_class, name="given"):
    """An optimizer that also keeps the gradient it was given in its state, as `name`: state_dict()
    then shows it, whole, from whichever stage and tier."""

    class Recording(optimizer_class):
        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            for param in (p for group in self.param_groups for p in group["params"]):
                if param.grad is not None:
                    self.state[param][name] = param.grad.clone()

    return Recording


def named(model):
    """{name: trainable parameter}."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def copied(tensors):
    """{name: a copy of the values}."""
    return {n: t.detach().clone() for n, t in tensors.items()}
