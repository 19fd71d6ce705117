"""What the notebooks share: live ranks, tables, timelines, a modelled link, bus and disk, checks.

    import course

    ranks = course.start(2)             two Python processes in one gloo group; %%px runs on both
    ranks["zero.memory()"]              an expression's value on each rank, in rank order
    course.compare([...])               formula, measured value, ratio; an error where they differ
    with course.record(link=1e8) as log:    on a rank: what ran when, on a link of 100 MB/s
    course.draw(ranks["log"])           in the notebook: one lane per rank and kind
    course.check(ranks, "take")         is the exercise right, and if not, what is wrong
    course.plant(ranks, "reduce_twice")     plant a mistake: which checks catch it?

Read first: `Live` (the ranks), `record` (timelines), `check`. The exercises are in exercises.py,
and build.py cuts them out of the stage files and runs the notebooks.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import difflib
import html
import itertools
import json
import logging
import mmap
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [p for p in (str(ROOT), str(HERE)) if p not in sys.path]

# Before torch: one thread per rank, so that two ranks share a laptop in peace; gloo by loopback,
# which needs no name look-up; and a profiler that does not report to the terminal.
_loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", (_loopback or ["lo"])[0])
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

# ---- live ranks ----------------------------------------------------------------------------------


class Live:
    """N Python processes (ipyparallel engines), each a rank of one gloo group.

    On a rank these names are there from the start: `rank`, `world`, `torch`, `dist`, `course`.
    """

    def __init__(self, n, limit, cluster, client):
        self.n, self.limit, self.cluster = n, limit, cluster
        self.view = client[client.ids[:n]]
        self.view.block = True
        self.folder = tempfile.mkdtemp(prefix="course-")
        atexit.register(self.stop)
        self._groups = 0
        self._join()
        _magics(self)

    def _join(self):
        store = os.path.join(self.folder, f"store{self._groups}")
        self._groups += 1
        calls = [
            self.view.client[i].apply_async(_join, rank, self.n, store, self.limit)
            for rank, i in enumerate(self.view.targets)
        ]
        for call in calls:
            call.get()

    def run(self, fn, *args, **kwargs):
        """[fn(*args, **kwargs) on each rank]; `fn` comes from a module, such as exercises."""
        return self.view.apply_sync(fn, *args, **kwargs)

    def __getitem__(self, expression):
        """[the value of a Python expression on each rank]."""
        return self.view.apply_sync(_value, expression)

    def reset(self):
        """A new group for the same processes, after an error has broken the old one."""
        self.view.apply_sync(_leave)
        self._join()

    def stop(self):
        """End the ranks; again is fine."""
        atexit.unregister(self.stop)
        if self.view is None:
            return
        with contextlib.suppress(Exception):
            self.view.apply_async(_leave).get(5)
        client, self.view = self.view.client, None
        if self.cluster is not None:
            halt(self.cluster, client)
        client.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def start(n=2, limit=20):
    """Start `n` ranks; a collective that waits longer than `limit` seconds raises. About 4 s.

    With COURSE_CLUSTER, the connection file of ranks that run already, it takes those instead: so
    the tests start processes once for all notebooks.
    """
    import ipyparallel

    running = os.environ.get("COURSE_CLUSTER")
    if running:
        client = ipyparallel.Client(running, timeout=60)
        client.wait_for_engines(n, timeout=60, interactive=False)
        client[:].apply_sync(_forget)
        return Live(n, limit, None, client)
    cluster = launch(n)
    client = cluster.connect_client_sync()
    client.wait_for_engines(n, timeout=120, interactive=False)
    return Live(n, limit, cluster, client)


def launch(n):
    """An ipyparallel cluster of `n` engines on this machine; nothing is left in the home folder."""
    import ipyparallel

    profile = tempfile.mkdtemp(prefix="course-")
    atexit.register(shutil.rmtree, profile, ignore_errors=True)
    os.environ.setdefault("IPYTHONDIR", profile)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    cluster = ipyparallel.Cluster(
        n=n, profile_dir=profile, log_level=logging.ERROR, shutdown_atexit=True
    )
    cluster.start_cluster_sync()
    return cluster


def halt(cluster, client):
    """End a cluster: first the engines and the controller by themselves, then what is left."""
    with contextlib.suppress(Exception):
        client.shutdown(hub=True, block=True)
    cluster.stop_cluster_sync()


# On a rank:


def _namespace():
    from IPython import get_ipython

    return get_ipython().user_ns


def _join(rank, world, store, limit):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=limit),
    )
    torch.manual_seed(rank)
    _namespace().update(
        rank=rank, world=world, torch=torch, dist=dist, course=sys.modules["course"]
    )


def _leave():
    if dist.is_initialized():
        dist.destroy_process_group()


def _forget():
    """Make a rank as good as new for the next notebook."""
    import gc

    from IPython import get_ipython

    get_ipython().reset(new_session=False)
    gc.collect()
    _leave()


def _value(expression):
    return eval(expression, _namespace())


# In the notebook:


def _magics(live):
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        return
    live.view.activate()
    for magics in shell.magics_manager.registry.values():
        if hasattr(magics, "progress_after_seconds"):
            magics.stream_output = False  # outputs in the order of ranks
            magics.progress_after_seconds = -1  # and no progress bars in them


# ---- numbers -------------------------------------------------------------------------------------


class Table:
    """Rows of text; numbers stand to the right."""

    def __init__(self, header, rows):
        self.header, self.rows = list(header), [[_text(cell) for cell in row] for row in rows]

    def __repr__(self):
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        pad = [str.rjust if self._is_number(i) else str.ljust for i in range(len(widths))]
        lines.insert(1, ["-" * width for width in widths])
        return "\n".join(
            "  ".join(p(cell, w) for p, cell, w in zip(pad, line, widths, strict=True)).rstrip()
            for line in lines
        )

    def _repr_html_(self):
        def row(cells, tag):
            ends = ["right" if self._is_number(i) else "left" for i in range(len(cells))]
            pairs = zip(cells, ends, strict=True)
            return "".join(
                f'<{tag} style="text-align:{e}">{html.escape(c)}</{tag}>' for c, e in pairs
            )

        body = "".join(f"<tr>{row(cells, 'td')}</tr>\n" for cells in self.rows)
        head = f"<thead><tr>{row(self.header, 'th')}</tr></thead>"
        return f"<table>{head}\n<tbody>{body}</tbody></table>"

    def _is_number(self, i):
        return all(
            re.fullmatch(r"[-+]?[\d,.]+(e[-+]?\d+)?( \w+)?|nan|inf|", r[i]) for r in self.rows
        )


def _text(cell):
    if isinstance(cell, bool) or not isinstance(cell, (int, float)):
        return str(cell)
    if isinstance(cell, int) or cell == int(cell):
        return f"{int(cell):,}"
    return f"{cell:.4g}"


def table(header, rows):
    """A table of anything."""
    return Table(header, rows)


def compare(rows, guess=None, unit="bytes", within=0.0):
    """A table of formula, measured value and ratio.

    rows: [(what, formula as text, its value, measured value)]. `guess` ({what: number}, where
    numbers may be missing) adds the reader's own column. AssertionError if a measured value is
    further than `within` (a share) from its formula: what a notebook shows is also held. None, for
    times: not held, since another machine has others.
    """
    guess = {k: v for k, v in (guess or {}).items() if isinstance(v, (int, float))}
    header = ["", "formula", f"formula, {unit}", f"measured, {unit}", "ratio"]
    header[3:3] = [f"your guess, {unit}"] if guess else []
    lines, wrong = [], []
    for what, formula, value, measured in rows:
        ratio = measured / value if value else 1.0 if measured == value else float("inf")
        line = [what, formula, value, measured, f"{ratio:.3f}"]
        line[3:3] = [guess.get(what, "")] if guess else []
        lines.append(line)
        if within is not None and abs(ratio - 1) > within:
            wrong.append(f"{what}: formula {_text(value)}, measured {_text(measured)} {unit}")
    if wrong:
        raise AssertionError("the formula does not hold: " + "; ".join(wrong))
    return Table(header, lines)


# ---- the code itself -----------------------------------------------------------------------------


def show(file, name):
    """The source of one function or class of a stage file, as it is now."""
    from exercises import find
    from IPython.display import Markdown, display

    first, last, lines = find(ROOT / file, name)
    code = "\n".join(lines)
    display(Markdown(f"`{file}`, lines {first} to {last}:\n\n```python\n{code}\n```"))


def diff(a, b):
    """`diff a b` of two stage files, without their headers."""
    from IPython.display import Markdown, display

    def body(file):
        text = (ROOT / file).read_text()
        return text[text.index('"""', 3) + 3 :].splitlines()

    lines = list(difflib.unified_diff(body(a), body(b), a, b, lineterm="", n=1))
    lines = [re.sub(r"^@@.*@@$", "@@", line) for line in lines]
    display(Markdown("```diff\n" + "\n".join(lines) + "\n```"))


# ---- timelines -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """Something that ran on a rank from `start` to `end`, in seconds since 1970."""

    kind: str
    start: float
    end: float
    nbytes: int = 0


class Log:
    """What one rank did: `spans`, ranges of torch.profiler and transfers; `began`, `ended`."""

    def __init__(self):
        self.spans, self.began, self.ended = [], time.time(), None

    @property
    def seconds(self):
        """Wall time."""
        return self.ended - self.began

    def busy(self, kind):
        """Seconds in which at least one span of `kind` ran."""
        total, until = 0.0, 0.0
        for span in sorted((s for s in self.spans if s.kind == kind), key=lambda s: s.start):
            total += max(0.0, span.end - max(span.start, until))
            until = max(until, span.end)
        return total


@contextlib.contextmanager
def record(link=None, disk=None, bus=None):
    """On a rank: log what runs inside. Profiler ranges `zero/...` give the kinds of the same name
    without "zero/", as do "forward", "backward" and "step" where the notebook names them
    with `course.span`. PyTorch's own range around an optimizer's step gives "optimizer".
    Collectives give "link: reduce_scatter" and "link: all_gather", transfers of files "disk: read"
    and "disk: write": from the call until the bytes are there.

    link, disk: bytes per second of a modelled link and disk: a transfer takes at least its bytes
    over that, one transfer at a time, beside the computation. Every rank has its own. None: as
    fast as the machine is. bus: the same between a device and the host, see `Bus`; None: none.
    """
    from torch.profiler import ProfilerActivity, profile

    import nvme
    import offload

    log = Log()
    wires = {"link": Wire(log, "link", link), "disk": Wire(log, "disk", disk)}
    old = {
        (offload.Ranks, "reduce_scatter"): _collective(wires["link"], "reduce_scatter"),
        (offload.Ranks, "all_gather"): _collective(wires["link"], "all_gather"),
        (nvme.File, "read"): _transfer(wires["disk"], "read"),
        (nvme.File, "write"): _transfer(wires["disk"], "write"),
    }
    if bus:
        old |= Bus(log, bus).wraps(offload)
    with contextlib.ExitStack() as stack:
        for (owner, name), wrap in old.items():
            stack.enter_context(replaced(owner, name, wrap(getattr(owner, name))))
        profiler = stack.enter_context(profile(activities=[ProfilerActivity.CPU]))
        log.began = time.time()
        yield log
        log.ended = time.time()
    events = profiler.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        kind = _kind(event.name())
        if kind:
            began = event.start_ns() / 1e9
            log.spans.append(Span(kind, began, began + event.duration_ns() / 1e9))
    inner = {b for a, b in itertools.pairwise(s for s in log.spans if s.kind == "optimizer")
             if b.end <= a.end}  # fmt: skip
    log.spans = sorted((s for s in log.spans if s not in inner), key=lambda span: span.start)


def _kind(name):
    if name.startswith("Optimizer.step#"):  # ours is an optimizer too: its own step is no update
        return None if "#ZeroStage" in name else "optimizer"
    kind = name.removeprefix("zero/")
    return kind if kind != name or kind in ("forward", "backward", "step") else None


def span(kind):
    """A profiler range around what the notebook does itself: "forward", "backward", "step"."""
    return torch.profiler.record_function(kind)


class Wire:
    """A link or a disk of `rate` bytes a second that moves one thing at a time."""

    def __init__(self, log, name, rate):
        self.log, self.name, self.rate, self.free = log, name, rate, 0.0

    def book(self, what, nbytes, slower=1):
        """Book a transfer now; returns what to call when it has to have ended."""
        began = time.time()
        if self.rate:
            began = max(began, self.free)
            self.free = began + slower * nbytes / self.rate
        arrives = self.free

        def ended():
            if self.rate:
                time.sleep(max(0.0, arrives - time.time()))
            end = arrives if self.rate else time.time()
            self.log.spans.append(Span(f"{self.name}: {what}", began, end, nbytes))

        return ended


def _collective(wire, what):
    def wrap(call):
        def moved(ranks, full):
            share = full.nbytes * (ranks.world - 1) // ranks.world  # what the ring sends
            wait, ended, done = call(ranks, full), wire.book(what, share), []

            def finish():
                result = wait()
                if not done:
                    done.append(ended())
                return result

            return finish

        return moved

    return wrap


def _transfer(wire, what):
    def wrap(call):
        def move(file, tensor, offset):
            return _Slow(call(file, tensor, offset), wire, what)

        return move

    return wrap


class _Slow:
    """An nvme.Transfer on the modelled disk: it has ended when its bytes would have."""

    def __init__(self, transfer, wire, what):
        self._transfer, self._ended = transfer, wire.book(what, transfer.nbytes)
        self._until = wire.free if wire.rate else 0.0
        self.nbytes = transfer.nbytes

    def done(self):
        return self._transfer.done() and time.time() >= self._until

    def wait(self):
        self._transfer.wait()
        ended, self._ended = self._ended, lambda: None
        ended()


class Bus:
    """A modelled bus between a device and the host, `rate` bytes a second each way, for ranks that
    have no GPU: there "device" and "host" are one memory, and a copy moves nothing. The copies
    that `offload.py` would then ask a GPU for take time here, and whoever would wait for their
    events waits. "copy: down" are gradients on their way to the host, "copy: up" new weights.

    Page-locked memory: the copy runs beside the computation. Pageable, `pin_memory=False`: it takes
    SLOWER times as long, and whoever asks for it waits, as with a GPU.
    """

    SLOWER = 4  # on one H200: page-locked 55 GB/s each way, pageable 8 to 14

    def __init__(self, log, rate):
        self.ways = {way: Wire(log, "copy", rate) for way in ("down", "up")}
        self.under_way = []  # (target, what waits)

    def copy(self, way, nbytes, pinned=True, target=None, now=False):
        """Start a copy; `now`: in the stream of the computation, which waits for it."""
        ended = self.ways[way].book(way, nbytes, 1 if pinned else self.SLOWER)
        if now or not pinned:
            ended()
        else:
            self.under_way.append((target, ended))

    def wait(self, whom=lambda target: True):
        """Wait for the copies to the targets `whom`."""
        due = [ended for target, ended in self.under_way if whom(target)]
        self.under_way = [(target, e) for target, e in self.under_way if not whom(target)]
        for ended in due:
            ended()

    def wraps(self, offload):
        """{(class, method): wrapper} of what starts a copy and what waits for one."""

        def add(part, reduced, call):
            call(part, reduced)
            if part.tier.sums_on_host:
                self.copy("down", part.sum.nbytes, part.tier.settings.pin_memory, part.sum)

        def land(tier, part, call):
            call(tier, part)
            self.copy("down", part.landed.nbytes, tier.settings.pin_memory, part.landed)

        def publish(tier, *args, call, **options):
            before = tier.traffic["host_to_device"]
            call(tier, *args, **options)
            if moved := tier.traffic["host_to_device"] - before:
                self.copy("up", moved, tier.settings.pin_memory)

        def read(shard, out, call):
            call(shard, out)
            if shard.tier == "host":
                self.copy("up", out.nbytes, now=True)

        def wait_for(lanes, target, call):
            call(lanes, target)
            self.wait(lambda other: other is target)

        def settle(lanes, call):
            call(lanes)
            self.wait()

        places = {
            (offload.Partition, "add"): add,
            (offload.Tier, "_land"): land,
            (offload.Tier, "_publish"): publish,
            (offload.Shard, "read"): read,
            (offload.Lanes, "wait_for"): wait_for,
            (offload.Lanes, "settle"): settle,
        }
        return {place: _around(method) for place, method in places.items()}


def _around(method):
    def wrap(call):
        def wrapped(*args, **options):
            return method(*args, call=call, **options)

        return wrapped

    return wrap


@contextlib.contextmanager
def replaced(owner, name, value):
    """An attribute of a class or module, replaced for a while."""
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)


class Slow(torch.nn.Module):
    """A module that takes `seconds` longer in forward and twice that in backward.

    A stand-in for a layer large enough to hide communication behind, on a laptop on which such a
    layer would be too much.
    """

    def __init__(self, inner, seconds):
        super().__init__()
        self.inner, self.seconds = inner, seconds

    def forward(self, x):
        return _Pause.apply(self.inner(x), self.seconds)  # in backward, before its gradients come


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(2 * ctx.seconds)
        return grad, None


def cached(path):
    """The share of a file's pages that the kernel has in memory, 0 to 1; None if it does not say.

    A read of those is no read of a disk.
    """
    size = os.path.getsize(path)
    in_memory = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as pages:
        first = ctypes.c_char.from_buffer(pages)
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), in_memory
        )
        del first
    return None if failed else sum(page & 1 for page in in_memory) / len(in_memory)


# ---- pictures ------------------------------------------------------------------------------------

# (fill, hatch): apart in colour, in grey and by hatch. Light to dark, as a printer sees them.
LOOK = {
    "forward": ("#cfe3f5", ""),
    "backward": ("#8db9df", ""),
    "reduce_scatter": ("#e08a1e", ""),
    "link: reduce_scatter": ("#f3c67a", "///"),
    "all_gather": ("#2c5f8a", ""),
    "link: all_gather": ("#6f9dc4", r"\\\\"),
    "boundary": ("#7a7a7a", ""),
    "step": ("#f1f1f1", ""),
    "update": ("#222222", ""),
    "copy: down": ("#f7ddb0", "..."),
    "optimizer": ("#9a9a9a", ""),
    "copy: up": ("#b9d7a8", "---"),
    "disk: read": ("#dddddd", "..."),
    "disk: write": ("#aaaaaa", "xxx"),
}
FILLS = ["#f3c67a", "#8db9df", "#2c5f8a", "#222222", "#dddddd"]
HATCHES = ["///", "", r"\\\\", "", "..."]


def figure(width=8.0, height=3.0, **options):
    """A matplotlib figure and axes in the course's style: sizes as a reader sees them."""
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 11,
            "axes.titlesize": 12,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "hatch.linewidth": 0.6,
            "figure.dpi": 96,
            "savefig.dpi": 96,
            "legend.frameon": False,
        }
    )
    return plt.subplots(figsize=(width, height), layout="constrained", **options)


def draw(logs, kinds=None, title="", ax=None, until=None):
    """A timeline: one lane per kind and rank, from the earliest beginning. logs: a Log per rank.

    kinds: which, from top to bottom; default: all that there are. until: seconds shown.
    """
    import matplotlib.pyplot as plt

    there = {span.kind for log in logs for span in log.spans}
    kinds = [k for k in (kinds or LOOK) if k in there] + (
        sorted(there - {*LOOK}) if not kinds else []
    )
    lanes = [(kind, rank) for kind in kinds for rank in range(len(logs))]
    if ax is None:
        _, ax = figure(8.5, 0.8 + 0.26 * len(lanes))
    zero = min(log.began for log in logs)
    for row, (kind, rank) in enumerate(lanes):
        fill, hatch = LOOK.get(kind, ("#999999", ""))
        bars = [
            ((s.start - zero) * 1e3, max((s.end - s.start) * 1e3, 0.05))
            for s in logs[rank].spans
            if s.kind == kind
        ]
        style = {"facecolor": fill, "hatch": hatch, "edgecolor": "black", "linewidth": 0.5}
        ax.broken_barh(bars, (row - 0.4, 0.8), **style)
    ax.set_yticks(range(len(lanes)), [f"{kind}, rank {rank}" for kind, rank in lanes])
    ax.set_ylim(len(lanes) - 0.4, -0.6)
    for row in range(len(logs), len(lanes), len(logs)):
        ax.axhline(row - 0.5, color="#cccccc", linewidth=0.8, zorder=0)
    ax.set_xlim(0, until and until * 1e3)
    ax.set_xlabel("milliseconds")
    ax.set_title(title, loc="left")
    if ax.figure.get_axes() == [ax]:
        plt.show()


def bars(
    groups,
    parts,
    values,
    unit="bytes per parameter",
    title="",
    label="{:.3g}",
    ax=None,
    legend=True,
):
    """Stacked bars. groups: names below the bars; parts: names in the legend, from the bottom;
    values[group][part]. ax: where to draw; default: a figure of its own, which is shown."""
    import matplotlib.pyplot as plt

    own = ax is None
    if own:
        _, ax = figure(7.5, 3.4)
    base = [0.0] * len(groups)
    for i, part in enumerate(parts):
        heights = [values[g][p] for g, p in ((g, i) for g in range(len(groups)))]
        style = {"color": FILLS[i], "hatch": HATCHES[i], "edgecolor": "black", "linewidth": 0.6}
        ax.bar(range(len(groups)), heights, 0.6, base, label=part, **style)
        base = [a + b for a, b in zip(base, heights, strict=True)]
    for x, total in enumerate(base):
        above = {"xytext": (0, 2), "textcoords": "offset points"}
        ax.annotate(label.format(total), (x, total), ha="center", va="bottom", **above)
    ax.set_xticks(range(len(groups)), groups)
    ax.set_ylabel(unit)
    ax.set_ylim(0, max(base) * 1.12)
    ax.set_title(title, loc="left")
    handles, names = ax.get_legend_handles_labels()
    if legend:
        ax.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))
    if own:
        plt.show()


def stacks(groups, panels, unit="bytes per parameter", title=""):
    """Stacked bars that lie, in panels beside each other, on one scale. groups: names at the left,
    from the top; panels: {title: {part: [a value for each group]}}."""
    import matplotlib.pyplot as plt

    size = {"ncols": len(panels), "sharey": True, "sharex": True}
    fig, axes = figure(9.0, 1.5 + 0.27 * len(groups), **size)
    for ax, (name, parts) in zip(axes, panels.items(), strict=True):
        left = [0.0] * len(groups)
        for fill, hatch, (part, widths) in zip(FILLS, HATCHES, parts.items(), strict=False):
            style = {"color": fill, "hatch": hatch, "edgecolor": "black", "linewidth": 0.6}
            ax.barh(range(len(groups)), widths, 0.65, left, label=part, **style)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for y, total in enumerate(left):
            if total:
                beside = {"xytext": (3, 0), "textcoords": "offset points", "fontsize": 10}
                ax.annotate(f"{total:.3g}", (total, y), va="center", **beside)
        ax.set_title(name, loc="left")
        ax.set_xlabel(unit)
    axes[0].set_xlim(0, 1.22 * max(ax.dataLim.x1 for ax in axes))
    axes[0].set_yticks(range(len(groups)), groups)
    axes[0].set_ylim(len(groups) - 0.5, -0.5)
    style = {"handlelength": 1.4, "fontsize": 10, "columnspacing": 1.2}
    if len({tuple(parts) for parts in panels.values()}) == 1:
        handles = axes[0].get_legend_handles_labels()
        fig.legend(*handles, loc="outside lower center", ncols=len(handles[1]), **style)
    else:
        for ax, parts in zip(axes, panels.values(), strict=True):
            place = {"loc": "upper left", "bbox_to_anchor": (-0.03, -0.14)}
            ax.legend(ncols=len(parts), **place, **style)
    fig.suptitle(title, x=0.01, ha="left", fontsize=12)
    plt.show()


def save_trace(logs, path):
    """Write the logs as a trace that https://ui.perfetto.dev and chrome://tracing open."""
    zero, events = min(log.began for log in logs), []
    for rank, log in enumerate(logs):
        kinds = list(dict.fromkeys(span.kind for span in log.spans))
        for i, kind in enumerate(kinds):
            about = {"ph": "M", "pid": rank, "tid": i}
            events.append({**about, "name": "thread_name", "args": {"name": kind}})
        for s in log.spans:
            at = {"ts": (s.start - zero) * 1e6, "dur": (s.end - s.start) * 1e6}
            at |= {"pid": rank, "tid": kinds.index(s.kind), "args": {"bytes": s.nbytes}}
            events.append({"ph": "X", "name": s.kind, **at})
        events.append(
            {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        )
    Path(path).write_text(json.dumps({"traceEvents": events}))


# ---- exercises -----------------------------------------------------------------------------------


class NotYet(Exception):
    """An exercise's answer is not right yet; the message says what is wrong."""

    def _render_traceback_(self):
        return [f"Not yet: {self}"]


answers = {}  # name of an exercise -> the source in its cell


def exercise(line, cell):
    """The magic `%%exercise NAME`: remember the cell as the answer; `check` runs it."""
    answers[line.strip()] = cell
    print(f"Kept. The next cell checks it: course.check(ranks, {line.strip()!r})")


def check(ranks, name):
    """Compare the answer in the cell `%%exercise NAME` with the real code, on all ranks.

    Raises NotYet, which says what is wrong.
    """
    from exercises import EXERCISES, verdict

    if name not in answers:
        raise NotYet(f"run the cell that begins with %%exercise {name} first")
    problem = verdict(ranks, EXERCISES[name], answers[name])
    if problem:
        raise NotYet(problem)
    print(f"Right. {EXERCISES[name].praise}")


seen = {}  # name of a planted mistake -> the checks that caught it


def plant(ranks, name):
    """Plant a mistake of mistakes.py on all ranks, run all its checks, and print which catch it and
    what they say. AssertionError if its own check does not."""
    from exercises import caught
    from mistakes import MISTAKES

    said = {MISTAKES[check].short: words for check, words in caught(ranks, name).items()}
    seen[name] = [check for check, words in said.items() if words]
    for check in seen[name]:
        print(f"check {check!r}: {said[check]}")
    silent = [check for check in said if check not in seen[name]]
    print(f"not seen by: {', '.join(silent)}")
    assert MISTAKES[name].short in seen[name], f"{name} is not caught by its own check"


def _register():
    with contextlib.suppress(ImportError):
        from IPython import get_ipython

        if get_ipython() is not None:
            get_ipython().register_magic_function(exercise, "cell", "exercise")


_register()
