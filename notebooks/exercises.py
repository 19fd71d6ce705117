"""The exercises: blanks cut out of the real code, and what a right answer does.

An exercise names a function of a product file and the lines to leave out. The blank in the notebook
and the solution are both cut from that file by a script (build.py), so they cannot drift from it.
To check an answer, `scenario` runs on every rank, once with the real function and once with the
answer in its place, and returns facts; the first fact that differs is told in the words of
`explain`. So a check compares behaviour, never text.

    add("take", notebook="01_stage1", file="stage1.py", function="Bucket.take",
        first="piece = ", last="copy_",        # leave out from the first line that has this to
        scenario=..., explain={fact: ...})     # the next that has that

Those of 07_break_it are made of mistakes.py: there the blank is the function with a mistake in it.

Read first: `cut`, `trial` (on a rank), `verdict` (in the notebook).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import itertools
import re
import sys
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from mistakes import MISTAKES, Mistake, planted, sources

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Exercise:
    """One blank. `explain`: {fact: text or function(wanted, got, rank) -> text}; "error": what to
    say after an exception."""

    name: str
    notebook: str
    file: str
    function: str  # qualified, such as "Bucket.take"
    first: str
    last: str
    why: str  # for the solution: what the lines do
    praise: str  # what a right answer is told
    scenario: Callable
    explain: dict = field(default_factory=dict)
    blank: str = ""  # what the blank says; default: its number of lines
    mistake: Mistake | None = None  # the blank is the function with this in it


EXERCISES = {}


def add(name, **about):
    """Register an exercise whose scenario is the decorated function."""

    def register(scenario):
        EXERCISES[name] = Exercise(name=name, scenario=scenario, **about)
        return scenario

    return register


# ---- cutting -------------------------------------------------------------------------------------


def find(path, name, text=None):
    """(first line number, last, [its lines, dedented]) of a function or class in a file, or in
    another text of it."""
    text = path.read_text() if text is None else text
    node = ast.parse(text)
    for part in name.split("."):
        inside = [n for n in node.body if getattr(n, "name", None) == part]
        if not inside:
            raise LookupError(f"{path.name} has no {name}: it was renamed, so mend its exercise")
        node = inside[0]
    start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    lines = text.splitlines()[start - 1 : node.end_lineno]
    return start, node.end_lineno, textwrap.dedent("\n".join(lines)).splitlines()


def cut(ex):
    """(the whole function, the same with a blank, the lines left out)."""
    _, _, lines = find(ROOT / ex.file, ex.function)
    if ex.mistake:
        _, _, broken = find(ROOT / ex.file, ex.function, sources(ex.name)[ex.file])
        right = textwrap.dedent("\n".join(line for line in lines if line not in broken))
        return "\n".join(lines), "\n".join(broken), right
    starts = [i for i, line in enumerate(lines) if ex.first in line]
    ends = [i for i, line in enumerate(lines) if starts and i >= starts[0] and ex.last in line]
    if not ends:
        raise LookupError(
            f"{ex.function} in {ex.file} has no line with {ex.first!r} and {ex.last!r} at or after "
            f"it: the code changed, so mend the marks of exercise {ex.name!r}"
        )
    left_out = lines[starts[0] : ends[0] + 1]
    indent = left_out[0][: -len(left_out[0].lstrip())]
    count = sum(bool(line.strip()) and line.strip()[0] != "#" for line in left_out)
    about = ex.blank or f"about {count} line{'s' if count > 1 else ''}"
    blank = f"{indent}...  # your code: {about}"
    return (
        "\n".join(lines),
        "\n".join([*lines[: starts[0]], blank, *lines[ends[0] + 1 :]]),
        textwrap.dedent("\n".join(left_out)),
    )


# ---- checking ------------------------------------------------------------------------------------


def trial(name, answer):
    """On a rank: (facts with the real function, facts with the answer, what went wrong)."""
    from course import replaced

    ex = EXERCISES[name]
    wanted = ex.scenario()
    module = importlib.import_module(ex.file.removesuffix(".py").replace("/", "."))
    *owner, function = ex.function.split(".")
    made = {}
    try:
        exec(compile(answer, "<your code>", "exec"), vars(module), made)
        if function not in made:
            return wanted, {}, f"the cell defines no function {function}"
        owner = getattr(module, owner[0]) if owner else module
        with replaced(owner, function, made[function]), ends():
            return wanted, ex.scenario(), ""
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        mine = [frame.lineno for frame in frames if frame.filename == "<your code>"]
        line = f" in line {mine[-1]} of your code" if mine else ""
        return wanted, {}, f"{type(error).__name__}{line}: {_plain(error)}"


@contextlib.contextmanager
def ends(limit=100_000):
    """TimeoutError in an answer that runs more lines than `limit`: it has a loop without an end."""
    count, old = itertools.count(), sys.gettrace()

    def trace(frame, event, arg):
        if frame.f_code.co_filename != "<your code>":
            return None
        if next(count) > limit:
            raise TimeoutError("a loop does not end")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(old)


def _plain(error):
    return re.sub(r"^\[[^\]]*\] *", "", str(error))  # gloo begins with the line of its own source


def verdict(ranks, ex, answer):
    """What is wrong with an answer, or an empty string."""
    try:
        compile(answer, "<your code>", "exec")
    except SyntaxError as error:
        return f"line {error.lineno} is no Python: {error.msg}"
    return _judged(ranks, ex, ranks.run(trial, ex.name, answer), "yours")


def _judged(ranks, ex, results, whose):
    errors = [(rank, error) for rank, (_, _, error) in enumerate(results) if error]
    if errors:
        ranks.reset()
        said = "; ".join(f"on rank {rank} {error}" for rank, error in errors)
        return ". ".join(filter(None, [said, ex.explain.get("error")]))
    for fact in results[0][0]:
        for rank, (wanted, got, _) in enumerate(results):
            if not same(wanted[fact], got.get(fact)):
                return _told(ex, fact, wanted[fact], got.get(fact), rank, whose)
    return ""


def _told(ex, fact, wanted, got, rank, whose):
    text = ex.explain.get(fact, "")
    text = text(wanted, got, rank) if callable(text) else text
    gives = f"{whose} gives {brief(got)}, the real code {brief(wanted)}"
    return f"{text} (Rank {rank}, {fact}: {gives}.)"


# ---- mistakes that are planted -------------------------------------------------------------------


@functools.cache
def _right_facts(check):
    return MISTAKES[check].check()


def survey(mistake, checks):
    """On a rank, with a mistake planted: {check: (facts of the real code, of this, error)}, up to
    the first error."""
    found = {check: (_right_facts(check), {}, "not run") for check in checks}
    with planted(mistake):
        for check in checks:
            try:
                found[check] = found[check][0], MISTAKES[check].check(), ""
            except BaseException as error:
                found[check] = found[check][0], {}, f"{type(error).__name__}: {_plain(error)}"
                break
    return found


def caught(ranks, mistake):
    """{check: what it says, or an empty string} of the checks of all mistakes, with one planted."""
    said, left = {}, list(MISTAKES)
    while left:
        found = ranks.run(survey, mistake, left)
        while left:
            check = left.pop(0)
            results = [one[check] for one in found]
            said[check] = _judged(ranks, EXERCISES[check], results, "this")
            if any(error for _, _, error in results):
                break  # the ranks have a new group now: go on with the next check
    return said


def same(a, b):
    """Equal, through lists, dicts and tensors; NaN equals itself."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same_kind = (a.shape, a.dtype) == (b.shape, b.dtype)
        return same_kind and torch.equal(a.nan_to_num(1e30), b.nan_to_num(1e30))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def brief(value):
    """A value in a few words."""
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return "; ".join(brief(v) for v in value[:2]) + ("; ..." if len(value) > 2 else "")
    if isinstance(value, dict):
        return ", ".join(f"{k} {brief(v)}" for k, v in value.items())
    if isinstance(value, torch.Tensor):
        shown = ", ".join(f"{v:.4g}" for v in value.flatten()[:6].tolist())
        return f"[{shown}{', ...' if value.numel() > 6 else ''}]"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


# ---- 00_memory -----------------------------------------------------------------------------------


def _reduce_scatter_wrong(wanted, got, rank):
    if got is None:
        return "Nothing comes back: give back a function that waits and returns the slice."
    if got.shape != wanted.shape:
        return f"A slice has numel / {6 // len(wanted)} elements; this has another shape."
    if torch.equal(got * (6 // len(wanted)), wanted):
        return "That is the mean. The mean is taken elsewhere: here the slices are only summed."
    if torch.equal(got.diff(), torch.full_like(got.diff(), 100.0)):
        return "These are the numbers of one rank: add up what all ranks sent."
    return "Is it slice r that rank r gets, and does every rank's share count once?"


@add(
    "reduce_scatter",
    notebook="00_memory",
    file="offload.py",
    function="Ranks.reduce_scatter",
    first="if self.gloo:",
    last="return lambda: (work.wait(), mine)",
    blank="about 3 lines, for gloo alone",
    why="`all_to_all_single` sends slice i to rank i. What arrives is one slice from each rank: as "
    "a matrix with a row per rank, its sum over the rows is this rank's slice of the sum, added in "
    "the same order in every run. The lambda waits, and only then adds. The second half is for "
    "other backends, which have a reduce-scatter of their own.",
    praise="Rank r has slice r of the sum, and nothing blocks before wait.",
    explain={
        "returns a function": "Give back a function that waits and returns the slice; "
        "all_to_all_single with async_op=True returns at once.",
        "slice": _reduce_scatter_wrong,
        "two at once": "Two reduce-scatters under way at once get in each other's way: each needs "
        "its own buffer.",
        "the full buffer is left alone": "The caller's buffer was overwritten.",
    },
)
def _reduce_scatter():
    from collections import Counter

    from offload import Ranks

    ranks = Ranks(None, torch.device("cpu"), Counter())
    full = torch.arange(6.0) * 100 + ranks.rank + 1
    kept, other = full.clone(), full * 2
    first = ranks.reduce_scatter(full)
    second = ranks.reduce_scatter(other)
    if not callable(first):
        return {"returns a function": False}
    got = first()
    return {
        "returns a function": True,
        "slice": got,
        "two at once": second() if callable(second) else None,
        "the full buffer is left alone": torch.equal(full, kept),
    }


# ---- 01_stage1 -----------------------------------------------------------------------------------


def _take_once_wrong(wanted, got, rank):
    if torch.equal(got, wanted * 4):
        return "The gradient is not multiplied with `mean`: ranks would be summed, not averaged."
    return "The first gradient of a window has to overwrite: the memory holds anything before."


def _take_twice_wrong(wanted, got, rank):
    if torch.equal(got * 4, wanted.new_tensor([8.0, 80.0, 800.0])):
        return "The second gradient replaced the first: only the last micro-batch would count. Add."
    if torch.equal(got, wanted.new_tensor([9.0, 90.0, 900.0])):
        return "The gradient that is added is not multiplied with `mean`."
    return "The second gradient of a window has to be added to the first, times `mean`."


@add(
    "take",
    notebook="01_stage1",
    file="stage1.py",
    function="Bucket.take",
    first="if index in self.written",
    last="piece.copy_(",
    why="Three cases: add in one pass; the same dtype, so one pass writes gradient times mean; or "
    "convert to FP32 first and multiply there. The other way round a bf16 gradient would be "
    "rounded to 8 bits once more. The mean is taken before the sum, so no finite mean overflows.",
    praise="First overwrite, then add, in FP32, and the mean is taken on the way in.",
    explain={
        "after one gradient": _take_once_wrong,
        "after two gradients": _take_twice_wrong,
        "a bf16 gradient": "Convert to the dtype of `piece` first and multiply there: a product in "
        "bf16 has 8 bits.",
    },
)
def _take():
    from collections import Counter

    import stage1
    from offload import Ranks

    ranks = Ranks(None, torch.device("cpu"), Counter())

    def taken(dtype, mean, *gradients):
        param = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
        bucket = stage1.Bucket(["w"], [param], ranks)
        bucket.grad = torch.full((bucket.numel,), 7.0)  # as uninitialized memory may look
        for gradient in gradients:
            param.grad = torch.tensor(gradient, dtype=dtype)
            bucket.take(0, mean, torch.float32)
        return bucket.grad[:3].clone()

    one, two = [4.0, 40.0, 400.0], [8.0, 80.0, 800.0]
    return {
        "after one gradient": taken(torch.float32, 0.25, one),
        "after two gradients": taken(torch.float32, 0.25, one, two),
        "a bf16 gradient": taken(torch.bfloat16, 1 / 3, [1.0, 2.0, 5.0]),
    }


# ---- 02_stage2 -----------------------------------------------------------------------------------


@add(
    "start_reduce",
    notebook="02_stage2",
    file="stage2.py",
    function="ZeroStage2._start_reduce",
    first="full = bucket.give",
    last="self._in_flight.append",
    why="`give` hands the full gradient over, so the bucket starts the next backward afresh: its "
    "memory goes when the reduce-scatter has ended. `self._in_flight` is a queue: what started "
    "first is waited for first, in the same order on all ranks.",
    praise="Each backward leaves its slice in the sum, and the full gradient is gone.",
    explain={
        "slices arrive": "After a backward no slice was added to the sums: start the "
        "reduce-scatter and append (bucket, wait) to self._in_flight.",
        "sums": "The sums of the window are wrong: is it this bucket's gradient, for this bucket?",
        "bytes of gradients": "More than the slices is kept after a backward: `give` must hand the "
        "full gradient over, and nobody may keep it.",
        "bytes sent": "Gradients travel in self.reduce_dtype, here bf16: half of FP32's bytes.",
        "weights": "The weights after the step differ.",
    },
)
def _start_reduce():
    import stage2

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    options = {"reduce_bucket_size": 30, "reduce_dtype": torch.bfloat16}
    zero = stage2.ZeroStage2(model, managed_gradient_accumulation=False, **options)
    with zero:
        x = torch.arange(8.0).view(2, 4) * (1 + zero.ranks.rank)
        for _ in range(2):
            zero.backward(model(x).square().mean())
        facts = {"slices arrive": all(b.part.sum is not None for b in zero.buckets)}
        if not facts["slices arrive"]:
            return facts
        facts["bytes sent"] = zero.traffic["reduce_scatter"]
        facts["sums"] = [bucket.part.sum.clone() for bucket in zero.buckets]
        facts["bytes of gradients"] = zero.memory()["device"]["grads"]
        zero.step()
        facts["weights"] = [p.detach().clone() for p in model.parameters()]
    return facts


# ---- 03_stage3 -----------------------------------------------------------------------------------


@add(
    "gather",
    notebook="03_stage3",
    file="stage3.py",
    function="ZeroStage3._gather",
    first="for bucket in unit.buckets",
    last="unit.waits.append",
    why="The buffer is made here and not kept: that is what saves the memory. Its own slice has to "
    "be in place before the all-gather starts, since the other ranks get it from there. What comes "
    "back is kept, not called: whoever needs the weights waits, and until then the link works "
    "beside the computation.",
    praise="The slice is in place, the all-gather has started, and nobody waited.",
    explain={
        "the full buffer is made": "bucket.flat is still None, or has not bucket.numel elements.",
        "this rank's slice is in it": "bucket.home.read has to copy this rank's slice to "
        "bucket.flat[bucket.mine], before the all-gather starts.",
        "started and not waited for": "Append what self.ranks.all_gather returns to unit.waits, "
        "one for each bucket, and do not call it.",
        "bytes sent": "The all-gather of every bucket is to be started once.",
        "weights": "After the wait the weights are not the model's.",
        "used by close()": "close(), which gathers all units, fails with it.",
    },
)
def _gather():
    import stage3

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2).bfloat16())
    zero = stage3.ZeroStage3(model, managed_gradient_accumulation=False)
    (unit,) = zero.units  # with two buckets, one for each dtype
    zero.traffic.clear()
    zero._gather(unit)
    made = [b.flat is not None and (b.flat.numel(), b.flat.dtype) for b in unit.buckets]
    facts = {"the full buffer is made": str(made)}
    if all(made):
        own = [torch.equal(b.flat[b.mine], b.home.tensor) for b in unit.buckets]
        facts["this rank's slice is in it"] = own
        facts["started and not waited for"] = [callable(wait) for wait in unit.waits]
        facts["bytes sent"] = zero.traffic["all_gather"]
        for wait in filter(callable, unit.waits):
            wait()
        facts["weights"] = [b.flat[: b.offsets[-1]].clone() for b in unit.buckets]
    unit.waits.clear()
    try:
        zero._release(unit)
        zero.close()  # gathers by itself
        facts["used by close()"] = "worked"
    except Exception as error:
        facts["used by close()"] = f"{type(error).__name__}: {error}"
    return facts


# ---- 04_boundary ---------------------------------------------------------------------------------


def _names_wrong(wanted, got, rank):
    if any(name.startswith("idle") for name in got):
        return "A parameter that no rank saw counts as used: it would move by weight decay alone."
    if set(got) < set(wanted):
        return "Parameters that another rank saw are missing: ask all ranks, not only this one."
    return "self._joint has to hold the names of parameters with a gradient on any rank."


@add(
    "boundary",
    notebook="04_boundary",
    file="stage2.py",
    function="ZeroStage2.finalize_gradient_accumulation_boundary",
    first="mine = [self.tier.norm_squared()",
    last="self.global_grad_norm = ",
    why="One exchange carries both. The squares of slices add up to the square of the whole, since "
    "each element is in one slice; the root is taken after the sum, and the loss scale is taken "
    "out there. A parameter counts if any rank saw it: each rank updates its slice of it, so they "
    "must agree, or a parameter would move in one half only.",
    praise="All ranks agree on who moves, and on one norm.",
    explain={
        "names": _names_wrong,
        "norm": "The norm has to be the same on all ranks: sum the squares of all of them first, "
        "take the root, and divide by the loss scale (here 8).",
        "weights": "The weights after the step differ.",
    },
)
def _boundary():
    import stage2

    torch.manual_seed(0)
    heads = {name: torch.nn.Linear(3, 2) for name in ("first", "second", "idle")}
    model = torch.nn.ModuleDict(heads)
    options = {"managed_gradient_accumulation": False, "loss_scale": 8.0}
    with stage2.ZeroStage2(model, **options) as zero:
        x = torch.arange(6.0).view(2, 3) + zero.ranks.rank
        head = model["second" if zero.ranks.rank else "first"]  # each rank sees another one
        zero.backward(head(x).square().mean())
        zero.finalize_gradient_accumulation_boundary()
        facts = {"names": sorted(zero._joint), "norm": zero.global_grad_norm}
        zero.step()
        facts["weights"] = [p.detach().clone() for p in model.parameters()]
    return facts


# ---- 05_offload ----------------------------------------------------------------------------------


def _masters_wrong(wanted, got, rank):
    if not any(m.any() for m in got):
        return "The masters have not moved: call group.step(gradient, active, self.options)."
    if all(torch.allclose(g, 8 * w, rtol=1e-4) for w, g in zip(wanted, got, strict=True)):
        return "The gradient was not multiplied with `coefficient`, which takes the loss scale out."
    return "The masters moved by something else than lr times the gradient."


def _weights_wrong(wanted, got, rank):
    if not any(w.any() for w in got):
        return "The device got the masters of before the step: publish after it."
    return "The weights on the device are not the masters."


@add(
    "update",
    notebook="05_offload",
    file="offload.py",
    function="Tier.update",
    first="gradient = group.partition.gradient",
    last="self._publish(group",
    why="`gradient` waits for this group's copy alone: the later ones may still be on their way. "
    "The loss scale and clipping are one factor, and 1.0 costs nothing. `step` moves FP32 masters "
    "where they live. `_publish` rounds them into the slice of the weights and only starts the "
    "copy up: the next group is updated meanwhile. With `later` the device's weights stay as they "
    "were until every rank's disk has answered.",
    praise="Updated where the state lives, and the weights are on their way up.",
    explain={
        "the masters moved by": _masters_wrong,
        "bytes up": "New masters have to reach the device once per group: self._publish(group, "
        "...) starts that copy.",
        "the weights moved by": _weights_wrong,
        "kept back until no disk can fail": "Pass later=self.may_fail to _publish: with NVMe, the "
        "weights may only change when all ranks know that no write has failed.",
    },
)
def _update():
    import tempfile

    from course import replaced

    import offload
    import stage2

    def step(settings):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        options = {"managed_gradient_accumulation": False, "loss_scale": 8.0, "lr": 1.0}
        options |= {"reduce_bucket_size": 8, "offload_optimizer": settings}
        with stage2.ZeroStage2(model, torch.optim.SGD, **options) as zero:
            weights = [p.detach().clone() for p in model.parameters()]
            read = [part.read()[offload.MASTER] for part in zero.tier.partitions]
            zero.backward(model(torch.ones(2, 4)).square().mean())
            zero.traffic.clear()
            zero.step()
            now = [part.read()[offload.MASTER] for part in zero.tier.partitions]
            pairs = zip(model.parameters(), weights, strict=True)
            return {
                "the masters moved by": [b - a for a, b in zip(read, now, strict=True)],
                "bytes up": zero.traffic["host_to_device"],
                "the weights moved by": [(p - w).detach() for p, w in pairs],
            }

    facts, kept_back = step(offload.Offload("cpu")), []

    def write(shard, start, values, lanes=None, later=False, call=offload.Shard.write):
        kept_back.append(later)
        return call(shard, start, values, lanes, later)

    with tempfile.TemporaryDirectory() as folder, replaced(offload.Shard, "write", write):
        step(offload.Offload("nvme", folder))
    return facts | {"kept back until no disk can fail": kept_back}


# ---- 06_nvme -------------------------------------------------------------------------------------


def _begun_wrong(wanted, got, rank):
    if not got:
        return 'No read was begun: self._move("read", ...) starts one.'
    if sorted(got) != got or got[0]:
        return "Read the groups in the order in which they wait: the first is needed first."
    if len(got) < len(wanted):
        return "A buffer stays empty while the first group is updated: read into every free one."
    return "Begin one read for each free buffer."


def _ended_wrong(wanted, got, rank):
    if got == "none":
        return "Keep the transfer beside its group: who takes the group out has to wait for it."
    return "Begin the reads here, and wait for none: the later ones go on during the update."


@add(
    "read_ahead",
    notebook="06_nvme",
    file="offload.py",
    function="NvmeTier.visit",
    first="while waiting and free",
    last=" )",
    why="`_move` only begins the read, and the transfer is kept: it is waited for below, when its "
    "group is the oldest. Until then the disk reads beside the update. A buffer is taken out of "
    "`free`, so no two groups get the same one, and it comes back when its write has ended. With "
    "`read=False`, when the file is new, there is nothing to read.",
    praise="Every free buffer is being filled, in order, and nobody has waited.",
    explain={
        "groups that got a buffer in use": "Two groups are in one buffer: take it out of `free`.",
        "reads while the file is new": "With read=False nothing is to be read: keep False in place "
        "of the transfer.",
        "reads begun before the first update": _begun_wrong,
        "rows read of each group": "A group has several rows, kinds[group]: read all of them.",
        "reads ended before the first update": _ended_wrong,
        "all in order": "Reads, updates and writes come in another order.",
        "masters": "The masters after two steps differ.",
        "error": "Each pass moves one group from `waiting` to `reading`, with a buffer out of "
        "`free`, as long as there are both.",
    },
)
def _read_ahead():
    import tempfile

    from course import replaced

    import offload
    import stage2

    seen, rows, in_use, shared = [], [], set(), []

    class Last:
        """A transfer that moves its bytes as late as it may: when it is waited for."""

        def __init__(self, what, buffer, begin):
            self.what, self.buffer, self.begin = what, buffer, begin

        def done(self):
            return False

        def wait(self):
            seen.append(f"{self.what} ended")
            self.begin().wait()
            if self.what.startswith("write"):
                in_use.discard(self.buffer.data_ptr())

    def number(group):
        return group.partition.groups.index(group)

    def move(tier, direction, group, buffer, kinds, call=offload.NvmeTier._move):
        seen.append(f"{direction} {number(group)}")
        if direction == "read":
            rows.append(len(kinds))
            if buffer.data_ptr() in in_use:
                shared.append(number(group))
            in_use.add(buffer.data_ptr())
        return Last(seen[-1], buffer, lambda: call(tier, direction, group, buffer, kinds))

    def step(group, *args, call=offload.Group.step):
        seen.append(f"update {number(group)}")
        call(group, *args)

    torch.manual_seed(0)
    model = torch.nn.Linear(40, 20, bias=False)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(replaced(offload.NvmeTier, "_move", move))
        stack.enter_context(replaced(offload.Group, "step", step))
        nvme = offload.Offload("nvme", folder, sub_group_size=80, buffer_count=3)
        options = {"managed_gradient_accumulation": False, "offload_optimizer": nvme}
        zero = stack.enter_context(stage2.ZeroStage2(model, **options))
        early = sum(what.startswith("read") for what in seen)
        for _ in range(2):
            for kept in (seen, rows, in_use, shared):
                kept.clear()
            zero.backward(model(torch.ones(2, 40)).square().mean())
            zero.step()
        story = list(seen)
        first = story[: story.index("update 0")]
        begun = [int(what.split()[1]) for what in first if re.fullmatch(r"read \d+", what)]
        return {
            "groups that got a buffer in use": list(shared),
            "reads while the file is new": early,
            "reads begun before the first update": begun,
            "rows read of each group": list(rows),
            "reads ended before the first update": ", ".join(
                what.split()[1] for what in first if re.fullmatch(r"read \d+ ended", what)
            )
            or "none",
            "all in order": ", ".join(story),
            "masters": [part.read()[offload.MASTER] for part in zero.tier.partitions],
        }


# ---- 07_break_it ---------------------------------------------------------------------------------

for _name, _mistake in MISTAKES.items():
    EXERCISES[_name] = Exercise(
        name=_name,
        notebook="07_break_it",
        file=_mistake.file,
        function=_mistake.function,
        first="",
        last="",
        why=_mistake.harm,
        praise=_mistake.praise,
        scenario=_mistake.check,
        explain=_mistake.explain,
        mistake=_mistake,
    )


# ---- 08_compare ----------------------------------------------------------------------------------

_PLACES = {  # what is asked for: (stage, offload, offload_param, dtype)
    "FP32, all on the device": (2, "none", "none", "float32"),
    "bf16, all on the device": (2, "none", "none", "bfloat16"),
    "FP32, state on the host": (2, "cpu", "none", "float32"),
    "FP32, state and weights on the host": (3, "cpu", "cpu", "float32"),
    "FP32, state and weights on disk": (3, "nvme", "nvme", "float32"),
}


def _state_wrong(place):
    def told(wanted, got, rank):
        if place == "FP32, all on the device":
            return "FP32 weights in the same memory are their own master: two moments are left."
        if place == "bf16, all on the device":
            return "A bf16 weight cannot be its own master: 4 bytes of FP32 master come on top."
        if place == "FP32, state on the host":
            return "The weights are elsewhere, so the host keeps a master of its own: 4 + 8 bytes."
        if place == "FP32, state and weights on disk":
            return "On disk the master has a place of its own, whatever lies beside it."
        return "Weights and state are both in host memory, and FP32: one of them serves as both."

    return told


def _gathers_wrong(wanted, got, rank):
    if got * 2 == wanted:
        return "Stage 3 gathers for each forward and again for each backward."
    return "Stage 3 gathers in each of the m micro-batches, twice."


def _crosses_wrong(wanted, got, rank):
    if wanted:
        return "State is updated on one side, weights live on the other: the fresh slice crosses."
    return "State and weights are both on the device: nothing crosses after the update."


@add(
    "formulas",
    notebook="08_compare",
    file="notebooks/demo.py",
    function="formulas",
    first="# Adam's two moments",
    last="crosses = ",
    why="`state`: Adam's moments are 8 bytes, and a master 4 more, unless FP32 weights lie in the "
    "same memory and are their own. A file keeps a master all the same. `sums`: stage 1 reduces "
    "once a window, the others on every backward. `gathers`: stage 3 alone gathers for computing; "
    "an embedding's backward needs no weights, hence `<=`. `crosses`: weights cross once, if they "
    "are updated on one side and used on the other; disk counts as the host's side.",
    praise="That is the whole matrix: what each stage and place holds and moves.",
    explain={
        "error": 'Set state, sums, gathers and crosses to texts such as "12*P/N".',
        **{f"state: {place}": _state_wrong(place) for place in _PLACES},
        "sums: stage 1": "Stage 1 adds up on each rank and reduces once a window: no m.",
        "sums: stage 2": "Stage 2 reduces on every backward: m times.",
        "sums: stage 3": "Stage 3 reduces on every backward, as stage 2 does.",
        "gathers: stage 1": "Stages 1 and 2 gather the weights once, after the step.",
        "gathers: stage 2": "Stages 1 and 2 gather the weights once, after the step.",
        "gathers: stage 3": _gathers_wrong,
        "gathers: stage 3 at most": "An embedding's backward needs no weights: begin with "
        '"<= ", or the measured bytes, which are less, would count as broken.',
        "crosses: state on the host": _crosses_wrong,
        "crosses: state on disk": _crosses_wrong,
        "crosses: all on the device": _crosses_wrong,
        "crosses: weights on the host": _crosses_wrong,
    },
)
def _formulas():
    from notebooks import demo

    def of(stage, home="none", weights="none", dtype="float32"):
        args = demo.arguments(stage, ["--offload", home, "--device", "cpu", "--dtype", dtype])
        args.offload_param = weights
        held, moved = demo.formulas(args)
        return held | moved

    def value(text):
        return eval(text.removeprefix("<= "), {"P": 1200, "N": 4, "e": 4, "m": 3})

    tiers = {"none": "device", "cpu": "host", "nvme": "nvme"}
    facts = {}
    for place, args in _PLACES.items():
        facts[f"state: {place}"] = value(of(*args)[f"{tiers[args[1]]} optimizer"])
    for stage in (1, 2, 3):
        facts[f"sums: stage {stage}"] = value(of(stage)["reduce_scatter"])
    for stage in (1, 2, 3):
        facts[f"gathers: stage {stage}"] = value(of(stage)["all_gather"])
    facts["gathers: stage 3 at most"] = of(3)["all_gather"].startswith("<= ")
    facts["crosses: state on the host"] = value(of(2, "cpu")["host_to_device"])
    facts["crosses: state on disk"] = value(of(3, "nvme")["host_to_device"])
    facts["crosses: all on the device"] = value(of(2)["host_to_device"])
    facts["crosses: weights on the host"] = value(of(3, "none", "cpu")["device_to_host"])
    return facts


# ---- 09_scale ------------------------------------------------------------------------------------


def _elements_wrong(wanted, got, rank):
    if got == 10:
        return "Four equal slices need a multiple of four elements: the bucket has to be padded."
    if got is not None and got < 10:
        return "The parameters do not fit: round the slice up, not down."
    return "Pad to the next multiple of N, and no further."


@add(
    "layout",
    notebook="09_scale",
    file="stage1.py",
    function="Bucket.__init__",
    first="shard = max(",
    last="self.mine = ",
    why="`-(-a // b)` is a / b rounded up. At least one element each, so that all ranks take part "
    "in every collective, even for a bucket of nothing but empty parameters. All slices have one "
    "size, as reduce-scatter and all-gather want it, so the last ranks may own padding only.",
    praise="Every element has one owner, all slices have one size, and the padding is the least.",
    explain={
        "set": "Set self.numel and self.mine.",
        "10 elements, 4 ranks": _elements_wrong,
        "12 elements, 4 ranks": "12 elements divide by 4: no padding is needed.",
        "slices of 4 ranks": "Rank r owns `shard` elements, from r times `shard` on.",
        "3 elements, 1,024 ranks": "Every rank owns one element, most of them padding.",
        "no elements, 4 ranks": "A slice has at least one element, or ranks would have nothing to "
        "send in a collective.",
    },
)
def _layout():
    from types import SimpleNamespace

    import stage1

    def bucket(elements, world, rank=0):
        param = torch.nn.Parameter(torch.zeros(elements))
        return stage1.Bucket(["w"], [param], SimpleNamespace(world=world, rank=rank))

    facts = {"set": [hasattr(bucket(10, 4), name) for name in ("numel", "mine")]}
    if not all(facts["set"]):
        return facts
    mine = [bucket(10, 4, rank).mine for rank in range(4)]
    return facts | {
        "10 elements, 4 ranks": bucket(10, 4).numel,
        "12 elements, 4 ranks": bucket(12, 4).numel,
        "slices of 4 ranks": [(s.start, s.stop) for s in mine],
        "3 elements, 1,024 ranks": bucket(3, 1024).numel,
        "no elements, 4 ranks": bucket(0, 4).numel,
    }
