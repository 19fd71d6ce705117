"""What the test_cases_*.py files share: the models, the modes and one way to run through them.

Unless a test says otherwise: FP32 weights that start at 0, SGD with lr=1, no momentum, no clipping.
"Every mode" is every stage, without offload, with CPU offload and with NVMe, managed and unmanaged.

    def train(run):                                 # on each rank, in each mode
        run.build(Dot(w=4))
        run.window({"w": 1}, {"w": 2})              # two backward calls and a step
        return run.weights()

    expect(train, world=2, wanted={"w": -3})        # all of w, on every rank, in every mode
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import time
import warnings
from dataclasses import dataclass

import torch
import torch._dynamo  # the first optimizer imports it: once here, not in every rank

from offload import Offload
from ranks import run_ranks
from stage1 import ZeroStage1
from stage2 import ZeroStage2
from stage3 import ZeroStage3

STAGES = {1: ZeroStage1, 2: ZeroStage2, 3: ZeroStage3}


class Dot(torch.nn.Module):
    """Loss = sum(w * x), so a backward gives w the gradient x, whatever w is.

    Dot(a=4, b=(), c=tensor): a weight of 4 zeros, a 0-dim one, one with given values. A forward
    uses those weights that it gets an x for: model(a=1) leaves b out.
    """

    def __init__(self, dtype=torch.float32, **weights):
        super().__init__()
        for name, given in weights.items():
            value = given.clone() if torch.is_tensor(given) else torch.zeros(given, dtype=dtype)
            self.register_parameter(name, torch.nn.Parameter(value))

    def forward(self, **xs):
        return sum((getattr(self, name) * as_x(x)).sum() for name, x in xs.items())


def as_x(x):
    return torch.tensor(x) if isinstance(x, list) else x


class Chain(torch.nn.Module):
    """y = w2 * (w1 * x) with w1=2 and w2=3: a backward of y gives the gradients (3x, 2x)."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Scale(2.0), Scale(3.0)

    def forward(self, x=1.0):
        return self.second(self.first(x))


class Scale(torch.nn.Module):
    """y = w * x with a scalar w."""

    def __init__(self, w):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(w))

    def forward(self, x):
        return self.w * x


@dataclass(frozen=True)
class Mode:
    stage: int
    offload: str = "none"  # the optimizer's state: "none", "cpu" or "nvme"
    managed: bool = True
    param: str = "none"  # the same for the parameters, in stage 3
    sums: str = "host"  # Offload(accumulate_on=...)

    def __str__(self):
        where = self.offload + (f" +{self.param} params" if self.param != "none" else "")
        where += " sums on device" if self.sums == "device" else ""
        return f"stage {self.stage}, {where}, {'' if self.managed else 'un'}managed"


BOTH = (True, False)
MODES = [Mode(s, tier, m) for s in STAGES for tier in ("none", "cpu", "nvme") for m in BOTH]
# Where it matters where the weights are: stage 3 also with its parameters offloaded.
PARAMS = [*MODES, *(Mode(3, tier, m, param=tier) for tier in ("cpu", "nvme") for m in BOTH)]
# Where it matters how a window is summed: also offloaded with the sums staying on the device.
SUMS = [
    *PARAMS,
    *(Mode(s, tier, m, sums="device") for s in STAGES for tier in ("cpu", "nvme") for m in BOTH),
]
UNMANAGED = [mode for mode in MODES if not mode.managed]
MANAGED = [mode for mode in MODES if mode.managed]
OFFLOADED = [mode for mode in PARAMS if mode.offload != "none"]
NVME = [mode for mode in PARAMS if mode.offload == "nvme"]


class Run:
    """One rank in one mode: builds the optimizer, trains, reads the weights.

    A managed window ends where the test says, by `set_gradient_accumulation_boundary`, and its
    backward calls are not divided, so that all modes have the same right value.
    """

    def __init__(self, mode, rank, world, folder):
        self.mode, self.rank, self.world, self.folder = mode, rank, world, folder
        self.managed = mode.managed
        self.made = []

    def build(self, model, optimizer=torch.optim.SGD, settings=None, **options):
        """`settings`: more of Offload's. SGD gets lr=1 unless `options` has one."""
        if optimizer is torch.optim.SGD:
            options.setdefault("lr", 1.0)
        if self.managed:
            options.setdefault("gradient_accumulation_steps", 8)
        more = {"accumulate_on": self.mode.sums, **(settings or {})}
        for name, tier in (("optimizer", self.mode.offload), ("param", self.mode.param)):
            if tier != "none":
                path = self.folder if tier == "nvme" else None
                options[f"offload_{name}"] = Offload(tier, path, **more)
        self.model = model
        self.zero = STAGES[self.mode.stage](
            model, optimizer, managed_gradient_accumulation=self.managed, **options
        )
        self.made.append(self.zero)
        return self.zero

    def backward(self, *loss, retain_graph=False, **xs):
        """A backward of `loss`, or of model(**xs)."""
        loss = loss[0] if loss else self.model(**xs)
        self.zero.backward(loss, scale_wrt_gas=not self.managed, retain_graph=retain_graph)

    def step(self):
        """Ends the window after whatever backward calls there were."""
        if self.managed:
            self.zero.set_gradient_accumulation_boundary(True)
        self.zero.step()

    def window(self, *calls):
        """A backward for each of `calls`, the model's arguments, and a step where one belongs."""
        for number, xs in enumerate(calls, start=1):
            if self.managed:
                self.zero.set_gradient_accumulation_boundary(number == len(calls))
            self.backward(**xs)
            if self.managed or number == len(calls):
                self.zero.step()

    def zero_grad(self, **options):
        """zero_grad() where a managed window is meant to be dropped, which it warns of."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"zero_grad\(\) in the middle")
            self.zero.zero_grad(**options)

    def weights(self):
        """{name: a copy of the full parameter}."""
        with self.zero.gathered():
            return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def masters(self):
        """{name: the full FP32 master}."""
        return self.zero.state_dict()["master"]

    def state(self, name):
        """The optimizer's state of one parameter, in full; plain SGD has none."""
        return self.zero.state_dict()["state"].get(name, {})


def results(check, world, modes=MODES, **options):
    """[(mode, rank, check(run))] for all of them, in one group of ranks.

    Memory that nobody has written to reads as NaN there, not as the zeros that fresh memory often
    holds by luck.
    """
    with empty_afterwards() as folder:

        def work(rank, world):
            gc.freeze()  # collections, and live_storages, need not look at what the imports made
            torch.set_deterministic_debug_mode("error")  # as a side effect, torch.empty is NaN
            return [in_mode(check, Run(mode, rank, world, folder)) for mode in modes]

        every = run_ranks(work, world, **options)
    return [(m, rank, v) for rank in range(world) for m, v in zip(modes, every[rank], strict=True)]


@contextlib.contextmanager
def empty_afterwards():
    """A folder for NVMe's files, in which nothing may be left after close()."""
    with tempfile.TemporaryDirectory(prefix="cases-") as folder:
        yield folder
        assert os.listdir(folder) == [], "files are left after close()"


def in_mode(check, run):
    try:
        value = check(run)
        for zero in run.made:
            zero.close()
        return value
    except Exception as error:
        raise AssertionError(f"in {run.mode}: {type(error).__name__}: {error}") from error


def expect(check, world, wanted, rel=0.0, modes=MODES, **options):
    """Requires check(run) to return `wanted` on every rank in every mode; see `agrees`."""
    __tracebackhide__ = True
    every = results(check, world, modes, **options)
    wrong = {}
    for mode, rank, value in every:
        if not agrees(value, wanted, rel):
            wrong.setdefault(brief(value), []).append(f"{mode}, rank {rank}")
    lines = [f"{value} in\n    " + "\n    ".join(where) for value, where in wrong.items()]
    assert not wrong, f"wanted {wanted}, but got\n" + "\n".join(lines)


def agrees(value, wanted, rel=0.0):
    """Whether `value` is `wanted`, numbers up to `rel`; a number stands for a tensor full of it."""
    if isinstance(wanted, dict):
        same = isinstance(value, dict) and value.keys() == wanted.keys()
        return same and all(agrees(value[key], wanted[key], rel) for key in wanted)
    if isinstance(wanted, tuple):
        same = isinstance(value, tuple) and len(value) == len(wanted)
        return same and all(agrees(a, b, rel) for a, b in zip(value, wanted, strict=True))
    if torch.is_tensor(value):
        wanted = torch.as_tensor(wanted, dtype=torch.float64)
        if wanted.dim() and wanted.shape != value.shape:
            return False
        return torch.allclose(value.double(), wanted.expand_as(value), rtol=rel, atol=0.0)
    if isinstance(wanted, float) and isinstance(value, float):
        return abs(value - wanted) <= rel * abs(wanted)
    return value == wanted


def brief(value):
    """`value` as text for a failure's message, without thousands of elements."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {brief(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(brief, value)) + ")"
    if torch.is_tensor(value) and value.numel() > 8:
        return f"{value.numel()} elements from {value.min().item():.9g} to {value.max().item():.9g}"
    return str(value)


def live_storages(least, wanted):
    """Sizes in bytes of the tensor memories of at least `least` bytes that are alive here; looks
    again for a while if they are not as `wanted`: a collective's thread lets go of its tensors a
    moment after it was waited for."""
    deadline = time.monotonic() + 2
    while (sizes := storages(least)) != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return sizes


def storages(least):
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    with torch._C.DisableTorchFunctionSubclass():  # or stage 3 would gather what it is asked for
        found = [t.untyped_storage() for t in tensors]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in found}
    return sorted(size for size in sizes.values() if size >= least)
