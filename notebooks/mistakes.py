"""Ten mistakes that people really made with sharded optimizers, as data, and a way to plant them.

Each is a small wrong text in the place of a right one in today's source. Nothing on disk changes:

    with planted("forget_the_mean"):
        import stage2                    # with the mistake in it, as long as the block lasts

    sources("forget_the_mean")           # {"stage1.py": its text with the mistake in it, ...}

Notebook 07_break_it plants them on live ranks; each comes with a check of a few lines, `MISTAKES[
name].check`, that returns facts to be compared with those of the right code. tests/mutations.py
plants them in a copy of the project and requires the test suite to fail, by the test named here.

Read first: `MISTAKES`, `planted`, and a check such as `_mean`.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("stage1.py", "stage2.py", "stage3.py")
FILES = (*STAGES, "offload.py", "nvme.py")


@dataclass(frozen=True)
class Mistake:
    """One mistake. `edits`: (right text, wrong text), each right text once in each of `files`."""

    name: str
    files: tuple  # what stands in all stages is wrong in all of them
    function: str  # where it is, such as "Bucket.give"; in a stage file, that of stage 2
    edits: tuple
    harm: str  # what goes wrong
    test: str  # which test of the suite fails for it
    check: Callable  # on every rank: facts, {what: value}
    explain: dict = field(default_factory=dict)  # what a wrong fact means
    praise: str = ""  # what the mended code does

    @property
    def short(self):
        """The name of its check."""
        return self.check.__name__.strip("_")

    @property
    def file(self):
        """The file that the notebook shows."""
        return "stage2.py" if "stage2.py" in self.files else self.files[0]


MISTAKES = {}


def mistake(name, files, function, *edits, **about):
    """Register a mistake whose check is the decorated function."""

    def register(check):
        MISTAKES[name] = Mistake(name, files, function, edits, check=check, **about)
        return check

    return register


# ---- planting ------------------------------------------------------------------------------------


def replaced_once(text, right, wrong, where):
    """`text` with `wrong` for `right`. LookupError unless `right` is in it exactly once."""
    if text.count(right) != 1:
        raise LookupError(
            f"{where} has {right!r} {text.count(right)} times, not once: the code changed, so mend "
            "the mistake's text in notebooks/mistakes.py"
        )
    return text.replace(right, wrong)


def sources(name):
    """{file name: its text with the mistake in it}."""
    texts = {}
    for file in MISTAKES[name].files:
        text = (ROOT / file).read_text()
        for right, wrong in MISTAKES[name].edits:
            text = replaced_once(text, right, wrong, file)
        texts[file] = text
    return texts


class _Planted(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports some modules from texts; the line in a traceback is the planted one too."""

    def __init__(self, texts):
        self.texts = texts

    def find_spec(self, name, path=None, target=None):
        known = name + ".py" in self.texts
        return importlib.util.spec_from_loader(name, self) if known else None

    def get_filename(self, name):
        return f"<{name}.py with a mistake>"

    def get_data(self, path):
        return self.texts[path[1:].split(" ")[0]].encode()


@contextlib.contextmanager
def planted(name):
    """Inside, `import stage2` and the others give modules that have the mistake; what was imported
    before is untouched, and comes back at the end."""
    finder, modules = _Planted(sources(name)), [file.removesuffix(".py") for file in FILES]
    kept = {module: sys.modules.pop(module) for module in modules if module in sys.modules}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for module in modules:
            sys.modules.pop(module, None)
        sys.modules.update(kept)


# ---- the mistakes and their checks ---------------------------------------------------------------


class Dot(torch.nn.Module):
    """Loss = sum(w x): a backward gives each weight that is named in the call the gradient x."""

    def __init__(self, **sizes):
        super().__init__()
        for name, size in sizes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(size)))

    def forward(self, **xs):
        return sum((getattr(self, name) * torch.tensor(x)).sum() for name, x in xs.items())


def _zero(model, optimizer=torch.optim.SGD, lr=1.0, **options):
    import stage2

    options.setdefault("managed_gradient_accumulation", "gradient_accumulation_steps" in options)
    return stage2.ZeroStage2(model, optimizer, lr=lr, **options)


def _values(model):
    """{name: its value}, one number where all elements have the same."""
    values = {n: [round(v, 5) for v in p.tolist()] for n, p in model.named_parameters()}
    return {name: v[0] if v.count(v[0]) == len(v) else v for name, v in values.items()}


@mistake(
    "forget_the_mean",
    STAGES,
    "ZeroStage2._on_gradient",
    ("1 / self.ranks.world", "1"),
    harm="Gradients are summed over the ranks instead of averaged: the step grows with N.",
    test="tests/test_cases_ranks.py::test_every_rank_starts_from_the_first_ones_values",
    explain={"weights": "The mean of 1 and 3 is 2; their sum would grow with the number of ranks."},
    praise="The mean over ranks, whatever N is.",
)
def _mean():
    with _zero(model := Dot(w=4)) as zero:
        zero.backward(model(w=1.0 if zero.ranks.rank == 0 else 3.0))
        zero.step()
        return {"weights": _values(model)}


@mistake(
    "clip_by_the_local_norm",
    STAGES,
    "ZeroStage2.finalize_gradient_accumulation_boundary",
    ("votes[:, 0].sum()", "votes[self.ranks.rank, 0]"),
    harm="Every rank clips by the norm of its own slice: too little, and the gradient turns.",
    test="tests/test_cases_ranks.py::test_the_norm_is_that_of_the_whole_gradient",
    explain={
        "norm": "(3, 4) has the norm 5, on both ranks: squares of slices are summed over ranks.",
        "weights": "(3, 4) clipped to the norm 1 is (0.6, 0.8).",
    },
    praise="One norm for all ranks: clipping shortens the gradient and does not turn it.",
)
def _clip():
    with _zero(model := Dot(w=2), gradient_clipping=1.0) as zero:
        zero.backward(model(w=[3.0, 4.0]))  # one number in each rank's slice
        zero.step()
        return {"norm": zero.global_grad_norm, "weights": _values(model)}


@mistake(
    "padding_in_the_norm",
    STAGES,
    "Bucket.give",
    ("full[self.offsets[-1] :].zero_()", "pass"),
    harm="Padding keeps what the memory held before, and that counts in the norm: clipping is "
    "wrong at random, and one NaN there skips the step.",
    test="tests/test_cases_ranks.py::test_padding_stays_zero",
    explain={
        "norm": "(2, 1, 2) has the norm 3: the place of padding after them must count as zero.",
        "step applied": "The norm is not finite, so the step was skipped.",
    },
    praise="Padding is zero, so it is nothing to the norm.",
)
def _padding():
    # Fresh memory often holds zeros by luck. In this mode of torch it holds NaN.
    torch.use_deterministic_algorithms(True)
    try:
        with _zero(model := Dot(w=3)) as zero:
            zero.backward(model(w=[2.0, 1.0, 2.0]))
            zero.step()
            applied = zero.was_step_applied()
            return {"norm": zero.global_grad_norm, "step applied": applied}
    finally:
        torch.use_deterministic_algorithms(False)


@mistake(
    "count_steps_per_parameter",
    ("offload.py",),
    "Group.step",
    ("\n        self.optimizer.step()", "\n            self.optimizer.step()"),
    harm="The optimizer steps once for each parameter: the first ones move several times a window, "
    "and Adam's step counts run ahead.",
    test="tests/test_window.py::test_an_idle_head_counts_no_step",
    explain={
        "steps": "After two windows each parameter has two steps, however many there are.",
        "weights": "If the gradient stays the same, Adam moves by the learning rate, 0.1 a step.",
    },
    praise="One step of the optimizer for all parameters of the group.",
)
def _count():
    with _zero(model := Dot(a=2, b=2, c=2, d=2), torch.optim.Adam, lr=0.1) as zero:
        for _ in range(2):
            zero.backward(model(a=1.0, b=1.0, c=1.0, d=1.0))
            zero.step()
        state = zero.state_dict()["state"]
        return {"steps": {n: int(s["step"]) for n, s in state.items()}, "weights": _values(model)}


@mistake(
    "overwrite_instead_of_add",
    ("offload.py",),
    "Partition.add",
    ("self.sum.add_(reduced)", "reduced"),
    harm="Each backward's slice replaces the sum: only the last micro-batch of a window trains.",
    test="tests/test_cases_accumulation.py::"
    "test_the_step_gets_the_sum_of_all_backward_calls_not_the_last_one",
    explain={"weights": "1 + 2 + 3 = 6: every backward is added to the window's sum, once."},
    praise="The window's gradient is the sum over its backwards.",
)
def _window():
    with _zero(model := Dot(w=4)) as zero:
        for x in (1.0, 2.0, 3.0):
            zero.backward(model(w=x))
        zero.step()
        return {"weights": _values(model)}


@mistake(
    "reduce_twice",
    STAGES,
    "Bucket.take",
    ("param.grad = None\n        self.written.add", "self.written.add"),
    harm="A gradient that has been reduced stays in p.grad; autograd adds the next one to it, and "
    "both are reduced: the first micro-batch counts twice.",
    test="tests/test_cases_accumulation.py::"
    "test_a_reduced_gradient_is_not_reduced_again_and_leaves_nothing_behind",
    explain={
        "p.grad after a backward": "What has moved to the bucket must not stay in p.grad.",
        "weights": "1 + 2 = 3: what has been reduced once must not come again.",
    },
    praise="p.grad is empty when its content has moved on.",
)
def _once():
    with _zero(model := Dot(w=4)) as zero:
        zero.backward(model(w=1.0))
        left = None if model.w.grad is None else model.w.grad.clone()
        zero.backward(model(w=2.0))
        zero.step()
        return {"p.grad after a backward": left, "weights": _values(model)}


@mistake(
    "stale_sums_for_an_idle_head",
    STAGES,
    "ZeroStage2._new_window",
    ("self.tier.drop()", "pass"),
    ("self._active, self._joint = set()",
     'self._active, self._joint = getattr(self, "_active", set())'),
    harm="The sums of a window outlive it: a head that this window did not use is moved by the "
    "gradient of an earlier one.",
    test="tests/test_cases_offload.py::test_gradients_of_an_earlier_window_never_come_back",
    explain={
        "value head": "Idle in the second window, it has to stay where the first one left it.",
        "policy head": "It has to move by 1 in each window: nothing of the first comes again.",
    },
    praise="A new window starts from nothing, and who is idle in it stays where it is.",
)  # fmt: skip
def _idle():
    with _zero(model := Dot(policy=4, value=4)) as zero:
        zero.backward(model(policy=1.0, value=1.0))
        zero.step()
        zero.backward(model(policy=1.0))
        zero.step()
        values = _values(model)
        return {"value head": values["value"], "policy head": values["policy"]}


@mistake(
    "read_before_the_write_ended",
    ("nvme.py",),
    "_Pool.submit",
    ("[older for older in live if transfer.conflicts(older)]", "[]"),
    harm="A read does not wait for a write of the same place: on a slow disk the update reads the "
    "state of the step before.",
    test="tests/test_nvme.py::test_a_read_waits_for_the_write_of_its_place_and_others_pass",
    explain={"what was read": "The read came after the write, so it has to bring the new bytes."},
    praise="A read waits for the writes of its place, and for no others.",
)
def _disk():
    import nvme

    step = nvme.Transfer._step

    def slow(transfer, at, stop):
        time.sleep(0.1 * transfer.write)  # a disk that takes its time to write
        return step(transfer, at, stop)

    nvme.Transfer._step = slow
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.closing(nvme.Disk(folder)) as disk:
            momentum, back = torch.full((1024,), 2.0), torch.empty(1024)
            file = disk.file("momentum", momentum.nbytes)
            write, read = file.write(momentum, 0), file.read(back, 0)
            read.wait()
            write.wait()
            return {"what was read": back[:3].clone()}
    finally:
        nvme.Transfer._step = step


@mistake(
    "skip_a_collective_on_one_rank",
    STAGES,
    "ZeroStage2._update",
    ("self._refresh_weights(self._joint)", "self._refresh_weights(self._active)"),
    harm="A rank that did not use an expert leaves out its all-gather, and the others wait for it "
    "until the group's time limit.",
    test="tests/test_disagree.py::test_a_branch_may_run_on_one_rank_only",
    explain={
        "weights": "Both ranks need the new weights of both: `shared` moves by 1 a step, the "
        "expert, which half of the ranks use, by 0.5.",
        "error": "A rank waited for another one until the group's time limit: they do not call the "
        "same collectives.",
    },
    praise="All ranks gather what any of them used: nobody waits, and all weights are equal.",
)
def _experts():
    with _zero(model := Dot(shared=4, expert=4), reduce_bucket_size=4) as zero:
        mine = {"expert": 1.0} if zero.ranks.rank == 0 else {}  # rank 1 does not need it
        for _ in range(2):
            zero.backward(model(shared=1.0, **mine))
            zero.step()
        return {"weights": _values(model)}


@mistake(
    "boundary_flag_left_on",
    STAGES,
    "ZeroStage2._new_window",
    ("self._override, self._finalized, self._next = None",
     'self._override, self._finalized, self._next = getattr(self, "_override", None)'),
    harm="A boundary that was set by hand stays set: from then on every micro-step is a step.",
    test="tests/test_window.py::"
    "test_a_manual_boundary_rules_until_the_window_closes_and_then_the_counter",
    explain={
        "steps applied": "The flag was for the first window. After it the counter rules again: two "
        "micro-steps a window.",
    },
    praise="The flag ends with its window.",
)  # fmt: skip
def _flag():
    applied = []
    with _zero(model := Dot(w=4), gradient_accumulation_steps=2) as zero:
        zero.set_gradient_accumulation_boundary(True)
        for _ in range(3):
            zero.backward(model(w=1.0))
            zero.step()
            applied.append(zero.was_step_applied())
        return {"steps applied": applied}
