"""Where the FP32 state of a rank lives, and how it comes to the update.

ZeRO gives every rank one slice of every bucket. For that slice the rank keeps, in FP32, the master
weights and the optimizer's state: 12 bytes per parameter for Adam (ZeRO paper, section 3.1). This
file keeps them on one of three tiers, and the optimizer runs where they live:

    tier     FP32 slice lives in     the update runs on    crosses per step and element (bf16 model)
    device   device memory           the device            nothing
    host     host memory             the CPU               4 bytes of gradient down, 2 of weight up
    nvme     one file per rank       the CPU               the same, and 12 bytes read, 12 written

A bucket's slice is cut into `Group`s of at most `sub_group_size` elements, DeepSpeed's sub-groups:
the unit in which state is read from disk, updated and written back. Inside a group every parameter
that the slice cuts through is a `Fragment`: a view into the flat FP32 row, wrapped as a Parameter
for a plain torch optimizer. A fragment whose parameter got no gradient has `grad=None`, and the
optimizer's own rule then leaves it alone.

    slice    [........w1........|..w2..|.......w3.......|pad]      rows: master, exp_avg, exp_avg_sq
    groups   [     group 0          |      group 1          ]
    fragments[   w1             | w2|w2|       w3       ]

    nvme     read k+1  |  update k  |  write k-1     all at once, in at most `buffer_count` buffers

Read first: `Partition.add` (a gradient arrives), `Tier.update` (the step), `NvmeTier.visit`.

In DeepSpeed: `DeepSpeedZeroOptimizer.async_accumulate_grad_in_cpu_via_gpu` and
`DeepSpeedZeroOptimizer_Stage3.partition_grads` (add), `_optimizer_step` (update),
`PartitionedOptimizerSwapper` and `PipelinedOptimizerSwapper` (nvme), `OffloadDeviceEnum`.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import inspect
import itertools
import math
import os
import signal
import threading
import warnings
import weakref
import zlib
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

import nvme

LINE = 16  # FP32 elements in a cache line
MASTER, GRADIENT = "zero/master", "zero/gradient"  # rows of the tier itself
CHUNK = 4096  # elements whose squares are summed in FP32 before FP64 takes over


@dataclass(frozen=True)
class Offload:
    """Settings for one kind of offload; the names are DeepSpeed's (`offload_optimizer` config).

    device: "cpu" or "nvme". nvme_path: a folder on the disk to use (required for "nvme").
    pin_memory: page-lock the host buffers that a GPU copies from and to; False: pageable memory,
    same numbers, slower copies, nothing locked. accumulate_on: "host" adds every backward's slice
    to a sum in host memory, "device" keeps the sum on the device and sends it down once a window.
    sub_group_size: elements per `Group`. buffer_count: groups in memory at once while the update
    streams from NVMe; 1 means read, update and write one after another. checksum: "nvme" only, a
    read whose bytes are not those that were written raises OSError; costs a CRC-32 of all of them.

    Raises ValueError for a value that cannot work.
    """

    device: str = "cpu"
    nvme_path: str | None = None
    pin_memory: bool = True
    accumulate_on: str = "host"
    sub_group_size: int = 2**24
    buffer_count: int = 4
    checksum: bool = False

    def __post_init__(self):
        if self.device not in ("cpu", "nvme"):
            raise ValueError(f'Offload(device={self.device!r}): give "cpu" or "nvme"')
        if self.device == "nvme" and not self.nvme_path:
            raise ValueError('Offload(device="nvme") needs nvme_path=, a folder on the disk to use')
        if self.accumulate_on not in ("host", "device"):
            raise ValueError(
                f'Offload(accumulate_on={self.accumulate_on!r}): give "host" or "device"'
            )
        for name in ("sub_group_size", "buffer_count"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"Offload({name}={getattr(self, name)!r}): give an integer >= 1")


# ---- the optimizer that runs on fragments --------------------------------------------------------


def optimizer_options(optimizer_class, options, model_device, update_device):
    """The options for `optimizer_class`; for a GPU's state on the host, with `fused=True` added.

    On a CPU the fused AdamW is 3 to 8 times faster than the loop that torch takes by default, but
    it rounds the last elements of a tensor differently, so a slice does not get the bits of the
    whole. Where equality with the plain optimizer is promised, its default therefore stays; pass
    `fused=True` for speed. Against a GPU's own kernels no such promise could be kept anyway.
    """
    chosen = {"fused", "foreach", "capturable", "differentiable"} & {*options}
    has_it = "fused" in inspect.signature(optimizer_class).parameters
    if has_it and not chosen and model_device.type == "cuda" and update_device.type == "cpu":
        return {**options, "fused": True}
    return options


def probe(optimizer_class, options, device):
    """The state that `optimizer_class` keeps for a parameter, {key: whether per element}, such as
    {"step": False, "exp_avg": True}.

    Space for them is claimed at construction, so they must be known before the first step. The
    probe also shows that the optimizer is elementwise: ZeRO updates slices of parameters alone, so
    a matrix updated whole and in two flat pieces must come out equal.

    Raises ValueError if it does not.
    """
    options = {**options, "lr": 0.1}
    device = "cpu" if device.type == "meta" else device  # whose tensors have no values to compare
    draw = torch.Generator().manual_seed(0)
    weight, *grads = (torch.randn(4, 3, generator=draw).to(device) for _ in range(4))

    def train(cut):
        param = torch.nn.Parameter(cut(weight).clone())
        optimizer = optimizer_class([{**options, "params": [param]}])
        for grad in grads:
            param.grad = cut(grad).clone()
            optimizer.step()
        return param.detach().flatten(), optimizer.state[param], param.shape

    name = optimizer_class.__name__
    try:
        whole, state, shape = train(lambda t: t)
        pieces = [train(lambda t, ab=ab: t.flatten()[slice(*ab)])[0] for ab in ((0, 5), (5, 12))]
    except Exception as error:
        raise ValueError(
            f"{name} cannot update a slice of a parameter alone, so ZeRO cannot shard it; use an "
            f"elementwise optimizer such as torch.optim.AdamW ({type(error).__name__}: {error})"
        ) from error
    if not torch.allclose(whole, torch.cat(pieces), rtol=1e-5, atol=1e-6):
        raise ValueError(
            f"{name} is not elementwise: a parameter updated in two slices differs from "
            "one updated whole, so ZeRO cannot shard it; use another, such as torch.optim.AdamW"
        )
    return {k: torch.is_tensor(v) and v.shape == shape for k, v in state.items()}


# ---- fragments, groups, partitions ---------------------------------------------------------------


class Fragment:
    """The part of one parameter that lies in one group: elements [start, end) of the group."""

    def __init__(self, name, param_group, start, end):
        self.name, self.param_group, self.start, self.end = name, param_group, start, end
        self.leaf = None  # the Parameter that the torch optimizer sees


class Group:
    """At most `sub_group_size` elements of one slice: the unit of update and of disk transfer."""

    def __init__(self, partition, start, end, cuts):
        self.partition, self.start, self.numel = partition, start, end - start
        self.fragments = []
        for name, param_group, a, b in cuts:
            # An empty parameter is cut nowhere; the first group keeps its step count all the same.
            if max(a, start) < min(b, end) or (a == b and start == 0):
                a, b = max(a, start), max(a, min(b, end))
                self.fragments.append(Fragment(name, param_group, a - start, b - start))
        self.offset = 0  # bytes into the file, on NVMe
        self.rows = {}  # kind -> FP32 tensor (numel,), while the group is in memory
        self.optimizer = None  # a torch optimizer over the fragments, from the first `attach` on
        self.param_groups = list(dict.fromkeys(f.param_group for f in self.fragments))

    def _build(self):
        # One param group for each outer one. Some optimizers make their state here, most later.
        tier, outer = self.partition.tier, {i: [] for i in self.param_groups}
        for f in self.fragments:
            f.leaf = torch.nn.Parameter(self.rows[MASTER][f.start : f.end])
            outer[f.param_group].append(f.leaf)
        groups = [{**tier.options(i), "params": leaves} for i, leaves in outer.items()]
        self.optimizer = tier.optimizer_class(groups)
        for f in self.fragments:
            self._adopt(f)

    def holds(self, active):
        """Whether a parameter of `active` has a part in this group."""
        return any(f.name in active for f in self.fragments)

    def attach(self, rows):
        """Point master weights and existing state at `rows`, wherever they are in memory now."""
        self.rows = rows
        if self.fragments and self.optimizer is None:
            self._build()
        for f in self.fragments:
            f.leaf.data = rows[MASTER][f.start : f.end]
            state = self.optimizer.state.get(f.leaf, {})
            for kind in state.keys() & rows.keys():
                state[kind] = rows[kind][f.start : f.end]

    def detach(self):
        """Let go of the memory; step counts and other scalars stay with the optimizer."""
        self.attach({kind: torch.empty(0, device=row.device) for kind, row in self.rows.items()})
        self.rows = {}

    def step(self, gradient, active, options):
        """Update the fragments of `active` parameters with their part of `gradient` (numel,)."""
        for group, outer in zip(self.optimizer.param_groups, self.param_groups, strict=True):
            group.update(options(outer))  # a scheduler has written to the outer groups
        moved = [f for f in self.fragments if f.name in active]
        for f in moved:
            f.leaf.grad = gradient[f.start : f.end]
        self.optimizer.step()
        for f in moved:
            f.leaf.grad = None
            self._adopt(f)

    def _adopt(self, fragment):
        # What the torch optimizer has made as its state moves into the flat rows.
        state = self.optimizer.state.get(fragment.leaf, {})
        for kind in state.keys() & self.rows.keys():
            row = self.rows[kind][fragment.start : fragment.end]
            if state[kind].data_ptr() != row.data_ptr():
                state[kind] = row.copy_(state[kind])


class Partition:
    """One rank's slice of one bucket: FP32 rows in groups, and the sum of this window's gradient.

    `home` is the `Shard` that holds the slice of the weights in the model's own precision.
    """

    def __init__(self, tier, home, cuts):
        self.tier, self.home, self.numel = tier, home, home.numel
        self.sum = None  # the window's gradient (numel,), on the device or on the host
        self.landed = None  # its FP32 copy down there, where the sum stays on the device
        self.pinned = None  # page-locked memory for either, kept from window to window
        self.master = self.state = None  # FP32 (numel,) and (kinds, numel), unless on NVMe
        self.groups, start = [], 0
        limit = tier.settings.sub_group_size if tier.settings else self.numel
        while start < self.numel:
            end = self._end_of_group(start, limit, cuts)
            self.groups.append(Group(self, start, end, cuts))
            start = end

    def _end_of_group(self, start, limit, cuts):
        # A fused kernel on a CPU works in whole cache lines from where a tensor starts: cutting
        # there leaves every element the same arithmetic, cut or not.
        end = min(start + limit, self.numel)
        for _, _, a, b in cuts:
            if a < end < b:
                end -= (end - max(a, start)) % LINE
        return end if end > start else min(start + limit, self.numel)

    def add(self, reduced):
        """Add the slice (numel,) that a reduce-scatter has left to the window's sum.

        DeepSpeed: `async_accumulate_grad_in_cpu_via_gpu`. The mistake to avoid is to copy where
        one must add: it keeps the last micro-batch only.
        """
        reduced = reduced.to(self.tier.accum_dtype)
        if self.tier.sums_on_host:
            self.tier.traffic["device_to_host"] += reduced.nbytes
        if self.tier.sums_on_host and reduced.is_cuda:
            add, self.sum = self.sum is not None, self.landing(reduced.dtype)
            self.tier.lanes.down(reduced, self.sum, add)
        else:
            self.sum = reduced if self.sum is None else self.sum.add_(reduced)

    def landing(self, dtype):
        """The host buffer (numel,) in which the window's gradient arrives from a GPU."""
        if self.pinned is None:
            self.pinned = self.tier.lanes.host(self.numel, dtype)
        return self.pinned

    def norm(self):
        """L2 norm of the window's sum as an FP64 scalar where the sum lives. FP32 over a few
        thousand elements, FP64 over those: FP32 over 20 million is wrong in the fourth digit."""
        whole = self.numel // CHUNK * CHUNK
        parts = (self.sum[:whole].view(-1, CHUNK), self.sum[whole:].view(1, -1))
        norms = [torch.linalg.vector_norm(p, dim=1, dtype=torch.float32) for p in parts]
        return torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64)

    def gradient(self, group):
        """The FP32 gradient (group.numel,) on the device where the group is updated."""
        if GRADIENT in group.rows:
            return group.rows[GRADIENT]
        whole = self.sum if self.landed is None else self.landed
        self.tier.lanes.wait_for(whole)
        return whole[group.start : group.start + group.numel].float()

    # What state_dict reads and load_state_dict writes:

    def read(self):
        """The slice's rows {kind: FP32 (numel,) on the CPU}."""
        rows = {kind: torch.zeros(self.numel) for kind in [MASTER, *self.tier.kinds]}
        for group in self.tier.visit(self.groups, write=False):
            for kind, row in rows.items():
                row[group.start : group.start + group.numel] = group.rows[kind]
        return rows

    def write(self, rows):
        """Replace rows {kind: FP32 (numel,)}; a new master reaches the weights too."""
        for group in self.tier.visit(self.groups):
            for kind, values in rows.items():
                group.rows[kind].copy_(values[group.start : group.start + group.numel])
            if MASTER in rows:
                self.tier._publish(group)
        self.home.settle()
        self.tier.settle()
        self.home.commit()

    def scalars(self):
        """{name: ([kinds that it has], {key: number})} of the parameters updated so far."""
        found = {}
        for group in self.groups:
            for f in group.fragments:
                if state := group.optimizer.state.get(f.leaf):
                    kinds = [k for k in self.tier.kinds if state.get(k) is not None]
                    rest = {k: v for k, v in state.items() if k not in kinds and v is not None}
                    found[f.name] = (kinds, {k: copied(v) for k, v in rest.items()})
        return found

    def set_scalars(self, found):
        """Take what `scalars` gave on any rank; a parameter that is not in it starts anew."""
        for group in self.groups:
            for f in group.fragments:
                group.optimizer.state.pop(f.leaf, None)
                if f.name in found:
                    kinds, numbers = found[f.name]
                    state = {k: self.tier.scalar(k, v, f) for k, v in numbers.items()}
                    group.optimizer.state[f.leaf] = state | dict.fromkeys(kinds, f.leaf.data)
            if group.rows:
                group.attach(group.rows)


# ---- tiers ---------------------------------------------------------------------------------------


class Tier:
    """FP32 slices in memory: on the device, or on the host for CPU offload."""

    may_fail = False  # memory does not; a disk does

    def __init__(self, settings, device, optimizer_class, outer, accum_dtype, traffic):
        self.settings, self.optimizer_class = settings, optimizer_class
        self.name = {None: "device", "cpu": "host", "nvme": "nvme"}[settings and settings.device]
        self.device = device if settings is None else host_of(device)
        self.sums_on_host = settings is not None and settings.accumulate_on == "host"
        self.outer = outer  # the param groups that the user and the schedulers see
        # Elementwise state, such as ["exp_avg", "exp_avg_sq"]; groups may ask for different ones.
        groups = range(len(outer))
        self.expected = [probe(optimizer_class, self.options(i), self.device) for i in groups]
        every = itertools.chain(*(keys.items() for keys in self.expected))
        self.kinds = list(dict.fromkeys(key for key, elementwise in every if elementwise))
        self.accum_dtype, self.traffic = accum_dtype, traffic
        self.lanes = Lanes(device, settings is not None and settings.pin_memory)
        self.partitions = []

    def options(self, index):
        """The options of one outer param group, without its parameters."""
        return {k: v for k, v in self.outer[index].items() if k != "params"}

    def partition(self, home, cuts):
        """Keep FP32 state for one bucket's slice. cuts: [(name, param group, start, end)]."""
        part = Partition(self, home, cuts)
        self.partitions.append(part)
        self._claim(part)
        return part

    def _claim(self, part):
        # An FP32 slice that lives on this tier anyway is its own master: no second copy.
        shared = part.home.tier == self.name and part.home.dtype == torch.float32
        part.master = part.home.tensor
        if not shared and self.name == "host":  # page-locked: a GPU takes new weights from it
            part.master = self.lanes.host(part.numel, torch.float32).copy_(part.home.values())
        elif not shared:
            part.master = part.home.values().to(self.device, torch.float32, copy=True)
        part.state = torch.zeros(len(self.kinds), part.numel, device=self.device)
        for group in part.groups:
            here = slice(group.start, group.start + group.numel)
            rows = {kind: part.state[i, here] for i, kind in enumerate(self.kinds)}
            group.attach({MASTER: part.master[here], **rows})

    def open(self, limit):
        """Called once, after the last `partition`. limit: seconds to wait for a disk that hangs."""

    def visit(self, groups, read=True, write=True):
        """Yield each group with its rows in memory, and keep what is changed in them."""
        yield from groups

    def norm_squared(self):
        """Sum of squares of this rank's slice of the window's gradient, a float.

        Padding and idle parameters are zeros in it. DeepSpeed: `get_grad_norm_direct`.
        """
        self.settle()
        if self.device.type == "meta":
            return 0.0  # sizes without values
        parts = [p for p in self.partitions if p.sum is not None]
        norms = torch.stack([p.norm() for p in parts]).tolist() if parts else []
        for i, part in enumerate(parts):
            if not math.isfinite(norms[i]):  # too large for FP32 squares, or really not finite
                norms[i] = torch.linalg.vector_norm(part.sum, dtype=torch.float64).item()
        return math.fsum(norm * norm for norm in norms)

    def land(self, guard):
        """Send sums that were kept on the device down to this tier, as FP32, once a window.
        guard: as in `update`."""
        if self.name == "device" or self.sums_on_host:
            return
        with guard("copy of the gradients", writes=False):
            for part in self.partitions:
                if part.sum is not None:
                    self.traffic["device_to_host"] += part.numel * 4
                    self._land(part)

    def _land(self, part):
        if not part.sum.is_cuda:
            part.landed = part.sum.float()
            return
        part.landed = part.landing(torch.float32)
        self.lanes.down(part.sum.float(), part.landed, add=False)

    def update(self, active, coefficient, guard):
        """One optimizer step over the groups that hold a parameter of `active`.

        coefficient: what the gradient is multiplied with, clipping and unscaling at once.
        guard: a context that raises on every rank if one rank's disk failed inside it; weights in
        memory change only after it, where a disk could have failed.
        """
        touched = [g for p in self.partitions for g in p.groups if g.holds(active)]
        homes = {id(g.partition): g.partition.home for g in touched}.values()
        try:
            with guard("update", writes=False):
                for group in self.visit(touched):
                    gradient = group.partition.gradient(group)
                    if coefficient != 1.0:
                        gradient = gradient.mul_(coefficient)
                    group.step(gradient, active, self.options)
                    self._publish(group, later=self.may_fail)
                for home in homes:
                    home.settle()
        except BaseException:
            for home in homes:
                home.commit(good=False)
            raise
        self.settle()
        for home in homes:
            home.commit()

    def _publish(self, group, later=False):
        """Round a group's new master weights into the slice that the model computes with."""
        home, master = group.partition.home, group.rows[MASTER]
        if group.partition.master is None or group.partition.master is not home.tensor:
            moved = home.write(group.start, master, self.lanes, later)
            if (self.name == "device") != (home.tier == "device"):
                way = "device_to_host" if self.name == "device" else "host_to_device"
                self.traffic[way] += moved

    def settle(self):
        """Wait, by events, for every copy under way. Nobody reads a host buffer before this."""
        self.lanes.settle()

    def drop(self):
        """Forget the window: nothing of it may reach a later one."""
        self.settle()
        for part in self.partitions:
            part.sum = part.landed = None

    def scalar(self, key, value, fragment):
        """A number of a saved state as the torch optimizer wants it, and each fragment its own:
        NAdam multiplies its tensor in place. "step" is a tensor, whatever it was saved as."""
        if key != "step" and not torch.is_tensor(value):
            return value
        options = self.options(fragment.param_group)
        on_device = options.get("fused") or options.get("capturable")
        value = torch.as_tensor(value, dtype=torch.float32)
        return value.to(self.device if on_device else "cpu", copy=True)

    def memory(self):
        """Live bytes {"device"|"host"|"nvme": {"grads": n, "optimizer": n}} of this rank.

        Step counts, a few bytes a parameter, are left out.
        """
        held = {tier: {"grads": 0, "optimizer": 0} for tier in ("device", "host", "nvme")}
        seen = {}  # storage -> tier: where sum and landed copy are one memory, it counts once
        for part in self.partitions:
            for tensor, tier in (
                (part.sum, self.sums_tier),
                (part.landed, "host"),
                (part.pinned, "host"),
            ):
                if torch.is_tensor(tensor):
                    seen.setdefault(tensor.untyped_storage(), tier)
        for storage, tier in seen.items():
            held[tier]["grads"] += storage.nbytes()
        self._count_state(held)
        return held

    @property
    def sums_tier(self):
        """Where a window is summed: "device" or "host"."""
        return "host" if self.sums_on_host else "device"

    def _count_state(self, held):
        for part in self.partitions:
            rows = [part.state] if part.master is part.home.tensor else [part.state, part.master]
            held[self.name]["optimizer"] += sum(t.untyped_storage().nbytes() for t in rows)

    def close(self):
        """Wait for what is under way and free the state."""
        self.settle()
        self.partitions = []


class NvmeTier(Tier):
    """FP32 slices in one preallocated file per rank; at most `buffer_count` groups in memory."""

    may_fail = True

    def __init__(self, *args):
        super().__init__(*args)
        self.disk = None  # made by `open`, where a failure reaches all ranks
        self.size = 0  # bytes of the file

    def _claim(self, part):
        # Rows in the file: master, optimizer state, and for a sum that was kept on the device, the
        # gradient. Every row starts on a block.
        rows = 1 + len(self.kinds) + (not self.sums_on_host)
        for group in part.groups:
            group.offset = self.size
            self.size += rows * self._row(group)

    @staticmethod
    def _row(group):
        return -(-group.numel * 4 // nvme.BLOCK) * nvme.BLOCK  # bytes

    def open(self, limit):
        """Claim the space and write the first masters: a full disk is an error here, not later."""
        self.disk = nvme.Disk(self.settings.nvme_path, checksum=self.settings.checksum, limit=limit)
        self.file = self.disk.file("optimizer.bin", max(self.size, 1))
        for part in self.partitions:
            values = part.home.values().float()
            for group in self.visit(part.groups, read=False):
                for row in group.rows.values():
                    row.zero_()
                group.rows[MASTER].copy_(values[group.start : group.start + group.numel])

    def visit(self, groups, read=True, write=True):
        """Yield each group in memory while the next are being read and the last written.

        DeepSpeed: `PipelinedOptimizerSwapper`. Raises OSError that names the file.
        """
        waiting, reading, writing = deque(groups), deque(), deque()
        kinds = {g: self._kinds(g) for g in waiting}
        size = max((len(kinds[g]) * self._row(g) for g in waiting), default=0)
        free = [nvme.empty(size) for _ in range(min(self.settings.buffer_count, len(waiting)))]
        while waiting or reading:
            while waiting and free:  # read ahead into every free buffer
                group, buffer = waiting.popleft(), free.pop()
                reading.append(
                    (group, buffer, read and self._move("read", group, buffer, kinds[group]))
                )
            if reading:
                group, buffer, transfer = reading.popleft()
                if transfer:
                    transfer.wait()
                rows = buffer[: len(kinds[group]) * self._row(group)].view(torch.float32)
                rows = rows.view(len(kinds[group]), -1)[:, : group.numel]
                group.attach(dict(zip(kinds[group], rows, strict=True)))
                yield group
                group.detach()
                kept = kinds[group][: 1 + len(self.kinds)]  # a gradient is not written back
                writing.append((buffer, write and self._move("write", group, buffer, kept)))
            # A buffer is free when its write has ended; wait for that only with nothing else to do.
            while writing and (not writing[0][1] or writing[0][1].done() or not (free or reading)):
                buffer, transfer = writing.popleft()
                if transfer:
                    transfer.wait()
                free.append(buffer)
        for _, transfer in writing:
            if transfer:
                transfer.wait()

    def _kinds(self, group):
        return [MASTER, *self.kinds] + ([GRADIENT] if group.partition.landed else [])

    def _move(self, direction, group, buffer, kinds):
        piece = buffer[: len(kinds) * self._row(group)]
        self.traffic["nvme_" + direction] += piece.nbytes
        return getattr(self.file, direction)(piece, group.offset)

    def _land(self, part):
        # One group at a time: the host never holds a whole slice.
        for group in part.groups:
            buffer = nvme.empty(self._row(group))
            row = buffer.view(torch.float32)[: group.numel]
            row.copy_(part.sum[group.start : group.start + group.numel])
            self.traffic["nvme_write"] += buffer.nbytes
            place = group.offset + (1 + len(self.kinds)) * self._row(group)
            self.file.write(buffer, place).wait()
        part.landed = True

    def _count_state(self, held):
        gradient = sum(self._row(g) for p in self.partitions for g in p.groups)
        held["nvme"]["grads"] += 0 if self.sums_on_host else gradient
        held["nvme"]["optimizer"] += self.size - (0 if self.sums_on_host else gradient)

    def close(self):
        """Wait for what is under way and remove the file."""
        super().close()
        if self.disk:
            self.disk.close()


def make_tier(settings, *args):
    """The tier that `settings`, an Offload or None, asks for."""
    kind = NvmeTier if settings is not None and settings.device == "nvme" else Tier
    return kind(settings, *args)


# ---- where weights live --------------------------------------------------------------------------


class Shard:
    """One rank's slice of one bucket of weights, in the model's precision, on device or host."""

    def __init__(self, tensor, tier="device"):
        self.tensor, self.tier = tensor, tier
        self.numel, self.dtype = tensor.numel(), tensor.dtype
        self.fresh = None  # new values that wait for `commit`
        self.torn = False  # on disk, whether it may hold parts of two steps

    def values(self):
        """The slice itself, (numel,)."""
        return self.tensor

    def prefetch(self):
        """Start bringing the slice closer; only a disk has anything to do."""

    def fetch(self):
        """Wait until the slice is in memory."""

    def read(self, out):
        """Copy the slice into `out`, a device tensor (numel,), in the order of its stream."""
        out.copy_(self.tensor, non_blocking=True)

    def write(self, start, values, lanes=None, later=False):
        """Take `values` at `start`, rounded to the weights' dtype. later: at `commit`. From host
        to device they go by `lanes`, whose `settle` waits. Returns the bytes moved."""
        if later and self.fresh is None:
            self.fresh = self.tensor.clone()
        out = (self.fresh if later else self.tensor)[start : start + values.numel()]
        if out.is_cuda and not values.is_cuda:
            return lanes.up(values, out)
        out.copy_(values)
        return out.nbytes

    def settle(self):
        """Wait for writes under way."""

    def commit(self, good=True):
        """Make the values written with `later` the weights, or forget them."""
        if self.fresh is not None and good:
            self.tensor.copy_(self.fresh)
        self.fresh = None


class NvmeShard(Shard):
    """The same slice in a file; on its way to the device it passes one block-aligned buffer."""

    def __init__(self, tensor, weights, offset):
        super().__init__(tensor, "nvme")
        self.weights, self.offset, self.nbytes = weights, offset, tensor.nbytes
        self.coming, self.writes = None, []

    def open(self):
        """Write the values that construction brought, and let go of them."""
        self.write(0, self.tensor)
        self.settle()
        self.commit()
        self.tensor = None

    def values(self):
        """The slice as a CPU tensor, (numel,)."""
        return self._arrive() if self.tensor is None else self.tensor

    def prefetch(self):
        """Start the read that `read` will wait for."""
        if self.coming is None and self.tensor is None:
            buffer = nvme.empty(self.nbytes)
            self.weights.traffic["nvme_read"] += self.nbytes
            self.coming = buffer, self.weights.file.read(buffer, self.offset)

    def _arrive(self):
        self.fetch()
        buffer, _ = self.coming
        self.coming = None
        return buffer[: self.nbytes].view(self.dtype)

    def fetch(self):
        """Wait until the slice is in memory; raises OSError that names the file."""
        self.prefetch()
        if self.coming is not None:
            try:
                self.coming[1].wait()
            except OSError:
                self.coming = None  # a second attempt reads again
                raise

    def read(self, out):
        """Wait for the read and copy the slice into `out`."""
        out.copy_(self.values())

    def write(self, start, values, lanes=None, later=False):
        """Start writing `values` at `start`; `settle` waits. A disk has no `later`."""
        self.coming, self.torn = None, True  # what was read ahead is old now
        buffer = nvme.empty(values.numel() * self.dtype.itemsize)
        piece = buffer[: values.numel() * self.dtype.itemsize]
        piece.view(self.dtype).copy_(values)
        self.weights.traffic["nvme_write"] += piece.nbytes
        place = self.offset + start * self.dtype.itemsize
        self.writes.append(self.weights.file.write(piece, place))
        return piece.nbytes

    def settle(self):
        """Wait for the writes; raises OSError that names the file if one failed."""
        writes, self.writes = self.writes, []
        for write in writes:
            write.wait()

    def commit(self, good=True):
        """What was written is there already: after a failure, here or elsewhere, the ranks have
        parts of two steps."""
        self.torn = not good


class Weights:
    """This rank's slices of a stage 3 model: on the device, in host memory, or in one file."""

    def __init__(self, settings, device, traffic):
        self.tier = {None: "device", "cpu": "host", "nvme": "nvme"}[settings and settings.device]
        self.device, self.traffic, self.shards = device, traffic, []
        self.lanes = Lanes(device, settings is not None and settings.pin_memory)
        self.settings, self.disk, self.size = settings, None, 0

    def shard(self, values):
        """Keep one slice; `values` is a device tensor (numel,) that the caller may free."""
        if self.tier == "nvme":
            shard = NvmeShard(values.cpu().clone(), self, self.size)
            self.size += -(-shard.nbytes // nvme.BLOCK) * nvme.BLOCK
        elif self.tier == "host":
            shard = Shard(self.lanes.host(values.numel(), values.dtype), "host")
            shard.tensor.copy_(values)
        else:
            shard = Shard(values.clone())
        self.shards.append(shard)
        return shard

    def open(self, limit):
        """Called once, after the last `shard`: claim the disk space and write the weights."""
        if self.tier == "nvme":
            self.disk = nvme.Disk(
                self.settings.nvme_path, checksum=self.settings.checksum, limit=limit
            )
            self.file = self.disk.file("weights.bin", max(self.size, 1))
            for shard in self.shards:
                shard.open()

    def memory(self):
        """Live bytes by tier."""
        held = [s.tensor.untyped_storage().nbytes() for s in self.shards if s.tensor is not None]
        return {self.tier: self.size if self.tier == "nvme" else sum(held)}

    def close(self):
        """Remove the file, free the memory."""
        if self.disk:
            self.disk.close()
        if any(shard.torn for shard in self.shards):
            warnings.warn(
                f"an update of {self.disk.path}/weights.bin failed: the model may have weights of "
                "two steps now; load a state that was saved before",
                stacklevel=5,
            )
        self.shards = []


# ---- copies between device and host --------------------------------------------------------------


def host_of(device):
    """The device of host memory: for a model on the meta device, sizes without values, meta too."""
    return device if device.type == "meta" else torch.device("cpu")


class Lanes:
    """Copies between a GPU and the host, on a stream of their own. Without a GPU: never used.

    Every copy leaves an event, and whoever reads its target, or writes its source again, waits for
    that event first.
    """

    def __init__(self, device, pin):
        self.home = host_of(device)
        self.pin = pin and device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.arriving = deque()  # (event, landing buffer, target, whether to add) going down
        self.leaving = deque()  # (event, staging buffer or None) going up
        self.spare = {}  # (numel, dtype) -> buffers that no copy uses any more

    def host(self, numel, dtype):
        """A host tensor (numel,), page-locked to the byte if asked for.

        torch rounds page-locked blocks up to a power of two, up to twice what was asked for, so
        the memory is allocated plainly and registered with the driver as it is.
        """
        tensor = torch.empty(numel, dtype=dtype, device=self.home)
        if self.pin and numel:
            cudart, address = torch.cuda.cudart(), tensor.data_ptr()
            torch.cuda.check_error(int(cudart.cudaHostRegister(address, tensor.nbytes, 0)))
            # The storage, not this tensor object: views outlive the tensor they were made from.
            weakref.finalize(tensor.untyped_storage(), cudart.cudaHostUnregister, address)
        return tensor

    def _take(self, numel, dtype):
        kept = self.spare.setdefault((numel, dtype), [])
        return kept.pop() if kept else self.host(numel, dtype)

    def _give(self, buffer):
        self.spare[buffer.numel(), buffer.dtype].append(buffer)

    def down(self, source, target, add):
        """Start a copy from the GPU to `target` on the host; `add`: to be added to it there."""
        landing = target
        if add:
            while len(self.arriving) > 1:  # two landing buffers are enough
                self._land()
            landing = self._take(source.numel(), source.dtype)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            landing.copy_(source, non_blocking=True)
        source.record_stream(self.stream)  # its memory is not given away before the copy is done
        self.arriving.append((self.stream.record_event(), landing, target, add))

    def _land(self):
        event, landing, target, add = self.arriving.popleft()
        event.synchronize()
        if add:
            target.add_(landing)
            self._give(landing)

    def wait_for(self, target):
        """Wait until everything that was sent down to `target` is there."""
        while any(target is other for _, _, other, _ in self.arriving):
            self._land()

    def up(self, values, out):
        """Start a copy of FP32 host `values` to `out` on the GPU, rounded to its dtype. Page-locked
        values the GPU reads where they are, and rounds itself; others are rounded into a staging
        buffer first. The caller leaves `values` alone until `settle`. Returns the bytes moved."""
        staging = None
        if not values.is_pinned():
            while len(self.leaving) > 1:  # two staging buffers are enough
                self._leave()
            values = staging = self._take(values.numel(), out.dtype).copy_(values)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            out.copy_(values.to(out.device, non_blocking=True))
        self.leaving.append((self.stream.record_event(), staging))
        return values.nbytes

    def _leave(self):
        event, staging = self.leaving.popleft()
        event.synchronize()
        if staging is not None:
            self._give(staging)

    def settle(self):
        """Wait for everything under way, in both directions."""
        while self.arriving:
            self._land()
        while self.leaving:
            self._leave()


# ---- the ranks -----------------------------------------------------------------------------------


def keep_freed_memory():
    """Have malloc keep large blocks that are freed, for the next that are asked for.

    glibc hands them back to the kernel, which zeroes every page of the next ones: for the buffers
    of gradients and parameters, freed and asked for in every backward, a tenth of a step's time.
    Other C libraries have no `mallopt`, and decide themselves.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        trim_threshold, mmap_threshold = -1, -3  # of malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30)


class RanksDisagree(RuntimeError):
    """Ranks called different things, or one of them failed. Raised on every rank."""


SPENT = []  # control groups of optimizers that are closed or gone


def destroy_spent_groups():
    """Called where all ranks have just met: a rank that is faster must not hang up on one that
    still listens."""
    while SPENT:
        with contextlib.suppress(ValueError):  # destroyed already, with all others
            dist.destroy_process_group(SPENT.pop())


class Ranks:
    """This rank among the N of a process group: the two collectives of ZeRO, counted, and small
    agreements between CPUs, over a Gloo group of their own, that end in one error on every rank
    where otherwise some would wait for a rank that does something else.
    """

    def __init__(self, process_group, device, traffic):
        self.group, self.device, self.traffic = process_group or dist.group.WORLD, device, traffic
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        keep_freed_memory()
        self.simulated = dist.get_backend(self.group) == "fake"  # sizes are real, nothing is sent
        self.gloo = f"{device.type}:gloo" in str(dist.get_backend_config(self.group))
        self.control, self.limit = self.group, None
        if not self.simulated:
            members = dist.get_process_group_ranks(self.group)
            limit = self.group._get_backend(device).options._timeout
            self.limit = limit.total_seconds()  # that nobody waits longer than
            sub = len(members) < dist.get_world_size()
            self.control = dist.new_group(members, limit, "gloo", use_local_synchronization=sub)
            destroy_spent_groups()
            self._end = weakref.finalize(self, SPENT.append, self.control)
        self.words = 2  # of an exchange; the same on every rank

    def close(self):
        """No more agreements."""
        if not self.simulated:
            self._end()

    def _count(self, kind, nbytes):
        self.traffic[kind] += nbytes * (self.world - 1) // self.world  # the ring algorithm's share

    def reduce_scatter(self, full):
        """Start summing `full` (numel,) over the ranks. The function that comes back waits, and
        gives this rank's slice (numel / N,).

        Gloo's own reduce-scatter is an all-reduce with copies around it. Exchanging the slices
        directly and adding them up in rank order takes half the time.
        """
        self._count("reduce_scatter", full.nbytes)
        if self.gloo:
            pieces = torch.empty_like(full)
            work = dist.all_to_all_single(pieces, full, group=self.group, async_op=True)
            return lambda: (work.wait(), pieces.view(self.world, -1).sum(0))[1]
        mine = full.new_empty(full.numel() // self.world)
        # torch 2.13 renames the collective and deprecates the old name; 2.11 has only that.
        start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = start(mine, full, group=self.group, async_op=True)
        return lambda: (work.wait(), mine)[1]

    def all_gather(self, full):
        """Start filling `full` (numel,) with every rank's own slice of it. The function that comes
        back waits.

        With Gloo every rank broadcasts its slice in place: four times as fast as Gloo's
        all-gather, which copies everything twice.
        """
        self._count("all_gather", full.nbytes)
        pieces = full.view(self.world, -1)
        if self.gloo:
            works = [
                dist.broadcast(piece, group=self.group, group_src=rank, async_op=True)
                for rank, piece in enumerate(pieces)
            ]
        else:
            start = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            works = [start(full, pieces[self.rank], group=self.group, async_op=True)]
        return lambda: [work.wait() for work in works]

    def broadcast(self, tensor, source=0):
        """Rank `source`'s values for everyone, into a tensor of any layout, on any device."""
        if tensor.numel():
            self._count("broadcast", tensor.nbytes)
            whole = tensor.contiguous()
            group = self.group if tensor.device == self.device else self.control
            dist.broadcast(whole, group=group, group_src=source)
            tensor.copy_(whole)

    def exchange(self, doing, numbers=(), error=None):
        """Tell every rank what this one is doing and hear the same from all: (N, words) in FP64.

        Word 0 names the operation, word 1 says that it failed here, then come `numbers`. Every
        rank must come here for the same reason; if not, all raise, and nobody is left waiting.
        """
        mine = torch.zeros(self.words, dtype=torch.float64)
        mine[0], mine[1] = zlib.crc32(doing.encode()), error is not None
        mine[2 : 2 + len(numbers)] = torch.tensor([float(n) for n in numbers], dtype=mine.dtype)
        sent = mine.repeat(self.world)
        heard = sent.clone()
        dist.all_to_all_single(heard, sent, group=self.control)
        self.traffic["control"] += mine.nbytes * (self.world - 1)
        votes = heard.view(self.world, -1)
        if (votes[:, 0] != mine[0]).any():
            self.disagree(doing, error)
        return votes

    def agree(self, doing, numbers=(), error=None):
        """The numbers of all ranks, (N, len(numbers)). Raises on every rank if one has an error."""
        votes = self.exchange(doing, numbers, error)
        if votes[:, 1].any():
            self.disagree(doing, error)
        return votes[:, 2 : 2 + len(numbers)]

    def disagree(self, doing, error):
        """Raise RanksDisagree that says who did what; a rank with an error of its own raises it."""
        said = doing if error is None else f"{doing} failed with {type(error).__name__}: {error}"
        told = self.gather(said)
        if error is not None:
            raise error
        said = "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(told))
        raise RanksDisagree(f"the ranks do not do the same thing: {said}")

    @contextlib.contextmanager
    def together(self, doing):
        """If one rank raises inside, every rank raises."""
        error = None
        try:
            yield
        except BaseException as caught:  # an interrupt too: the other ranks wait here
            error = caught
        self.agree(doing, error=error)

    def gather(self, mine):
        """A small object of every rank, in rank order."""
        every = [mine] * self.world
        if not self.simulated:
            dist.all_gather_object(every, mine, group=self.control)
        return every

    def assemble(self, piece, rank0_only=False):
        """All ranks' CPU slices `piece` in order, flat: on every rank or on rank 0 (else None)."""
        whole = None
        if not rank0_only or self.rank == 0:
            whole = piece.new_empty(self.world, piece.numel())
        if rank0_only:
            parts = None if whole is None else list(whole)
            dist.gather(piece, parts, group=self.control, group_dst=0)
        else:
            dist.all_gather(list(whole), piece, group=self.control)
        return None if whole is None else whole.flatten()

    def scatter(self, whole, numel):
        """Rank 0's flat CPU tensor `whole` cut into one slice (numel,) for each rank."""
        mine = torch.empty(numel)
        parts = None if whole is None else list(whole.view(self.world, -1))
        dist.scatter(mine, parts, group=self.control, group_src=0)
        return mine


# ---- state that moves ----------------------------------------------------------------------------


def collect_state(zero, rank0_only):
    """The state of a Zero optimizer as full FP32 tensors on the CPU, keyed by parameter name.

    One bucket's row at a time is put together; with `rank0_only` no other rank ever holds it.
    """
    scalars = [item for b in zero.buckets for item in b.part.scalars().items()]
    scalars = dict(item for rank in zero.ranks.gather(scalars) for item in rank)
    state = {name: dict(scalars[name][1]) for name in zero.names if name in scalars}
    master = {}
    for bucket in zero.buckets:
        with zero._guard("state_dict", writes=False):
            rows = bucket.part.read()
        for kind, piece in rows.items():
            whole = zero.ranks.assemble(piece, rank0_only)
            if whole is None:
                continue
            for name, param, start in zip(
                bucket.names, bucket.params, bucket.offsets, strict=False
            ):
                value = whole[start : start + param.numel()].view(param.shape)
                if kind == MASTER:
                    master[name] = value.clone()
                elif name in scalars and kind in scalars[name][0]:
                    state[name][kind] = value.clone()
    if rank0_only and zero.ranks.rank:
        return {}
    name_of = {id(param): name for name, param in zero.named.items()}
    groups = [
        {**group, "params": [name_of[id(p)] for p in group["params"]]}
        for group in zero.param_groups
    ]
    return {
        "state": state,
        "master": {name: master[name] for name in zero.names},
        "param_groups": groups,
        **{name: getattr(zero, name) for name in COUNTERS},
    }


COUNTERS = ("loss_scale", "good_steps", "global_steps", "skipped_steps")


def restore_state(zero, saved):
    """Give every rank its slices of rank 0's `saved`, bucket by bucket."""
    head = [None]
    with zero.ranks.together("load_state_dict"):
        if zero.ranks.rank == 0:
            check_state(zero, saved)
            kinds = zero.tier.kinds
            found = {
                name: ([k for k in kinds if k in s], {k: copied(s[k]) for k in s if k not in kinds})
                for name, s in saved["state"].items()
            }
            groups = [{k: v for k, v in g.items() if k != "params"} for g in saved["param_groups"]]
            counters = {name: saved[name] for name in COUNTERS if name in saved}
            head = [(found, groups, counters, "master" in saved)]
    if not zero.ranks.simulated:
        dist.broadcast_object_list(head, group=zero.ranks.control, group_src=0)
    found, groups, counters, has_master = head[0]
    for ours, theirs in zip(zero.param_groups, groups, strict=True):
        ours.update(theirs)
    if not zero.dynamic_scale:  # a constant scale is an argument, not state
        counters.pop("loss_scale", None)
    vars(zero).update(counters)
    for bucket in zero.buckets:
        bucket.part.set_scalars(found)
        rows = {}
        for kind in [*zero.tier.kinds] + [MASTER] * has_master:
            whole = None
            if zero.ranks.rank == 0:
                whole = torch.zeros(bucket.numel)
                for name, param, start in zip(
                    bucket.names, bucket.params, bucket.offsets, strict=False
                ):
                    entry = saved["master"] if kind == MASTER else saved["state"].get(name, {})
                    value = entry.get(name if kind == MASTER else kind)
                    if value is not None:
                        whole[start : start + param.numel()] = value.flatten()
            rows[kind] = zero.ranks.scatter(whole, bucket.part.numel)
        with zero._guard("load_state_dict"):
            bucket.part.write(rows)


def check_state(zero, saved):
    """Raise ValueError that lists every entry of `saved` that does not fit."""
    problems = [f"no entry {k!r}" for k in ("state", "param_groups") if k not in saved]
    problems = problems or [*_group_misfits(zero, saved), *_misfits(zero, saved)]
    if problems:
        raise ValueError("load_state_dict: " + "; ".join(problems))


def _group_misfits(zero, saved):
    groups = saved["param_groups"]
    if any("params" not in group for group in groups):
        yield "a param group has no 'params'"
        return
    theirs = [sorted(map(str, group["params"])) for group in groups]
    ours = [[] for _ in zero.param_groups]
    for name in sorted(zero.group_of):
        ours[zero.group_of[name]].append(name)
    if theirs != ours:
        yield f"param groups hold {theirs}, here {ours}"


def _misfits(zero, saved):
    for name in COUNTERS:
        if not isinstance(saved.get(name, 0), (int, float)):
            yield f"{name} is {saved[name]!r}, no number"
    masters = saved.get("master")
    for what, entries in (("master", masters), ("state", saved["state"])):
        if not isinstance(entries, (dict, type(None))):
            yield f"{what} is a {type(entries).__name__}, no dict"
            return
    if masters is not None:
        yield from (f"master of {n} is missing" for n in zero.names if n not in masters)
        for name, value in masters.items():
            yield from _misfit(zero, name, "master", value, True)
    for name, state in saved["state"].items():
        if not isinstance(state, dict) or name not in zero.trainable:
            yield from _misfit(zero, name, "state", state, True)
            continue
        expected = zero.tier.expected[zero.group_of[name]]
        yield from (f"{key} of {name} is missing" for key in expected if key not in state)
        for key, value in state.items():
            if key in expected:
                yield from _misfit(zero, name, key, value, expected[key])
            else:
                yield f"{key} of {name} is unknown to {zero.optimizer_class.__name__}"


def _misfit(zero, name, key, value, elementwise):
    shape = (*value.shape,) if torch.is_tensor(value) else None
    if name not in zero.trainable:
        yield f"{key} of {name}: no trainable parameter here"
    elif not elementwise and isinstance(value, (int, float, type(None))):
        return
    elif shape is None:
        yield f"{key} of {name} is a {type(value).__name__}"
    elif (wanted := (*zero.trainable[name].shape,) if elementwise else ()) != shape:
        yield f"{key} of {name} is {shape}, not {wanted}"


def copied(value):
    """A CPU copy of a tensor, and whatever else it may be: modules have extra state."""
    return value.detach().cpu().clone() if torch.is_tensor(value) else copy.deepcopy(value)


def same_bits(a, b):
    """Whether two tensors of one dtype hold the same bits; NaN equals itself here."""
    return torch.equal(*(t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b)))


TRAINABLE = (torch.float32, torch.bfloat16, torch.float16)


# ---- refusals ------------------------------------------------------------------------------------


def check_arguments(given):
    """Raise ValueError for an argument that cannot work; given: {name: value}."""
    for name in ("gradient_accumulation_steps", "reduce_bucket_size", "loss_scale_window"):
        if not isinstance(given[name], int) or given[name] < 1:
            raise ValueError(f"{name}={given[name]!r}: give an integer >= 1")
    for name in ("gradient_clipping", "loss_scale", "initial_loss_scale"):
        value, special = (
            given[name],
            {"gradient_clipping": None, "loss_scale": "dynamic"}.get(name, 1),
        )
        number = isinstance(value, (int, float)) and 0 < value < math.inf
        if not number and value != special:
            raise ValueError(f"{name}={value!r}: give a number > 0, or {special!r}")
    for name in ("reduce_dtype", "grad_accum_dtype"):
        if given[name] not in TRAINABLE:
            raise ValueError(f"{name}={given[name]}: give float32, bfloat16 or float16")
    for name in ("offload_optimizer", "offload_param"):
        if not isinstance(given[name], (Offload, type(None))):
            raise ValueError(f'{name}={given[name]!r}: give an Offload, such as Offload("cpu")')


def check_model(zero, arguments):
    """Raise ValueError, on every rank, for a model that cannot be sharded, and for a model or
    arguments, {name: value}, that differ by rank."""
    problem, memory, ranks = None, {}, zero.ranks
    for name, p in [*zero.named.items(), *zero.model.named_buffers()]:
        place, (start, stop) = p.untyped_storage().data_ptr(), extent(p)
        others = memory.setdefault(place, [])
        twin = next((n for n, a, b in others if a < stop and start < b), None)
        others.append((name, start, stop))
        if is_managed(p, zero):
            problem = f"{name} is managed by another Zero object: close() that one first"
        elif hasattr(type(p), "refuse"):  # stage 3's Released, which needs its owner
            problem = f"{name} was sharded by a Zero object that is gone: make the model anew"
        elif p.device != ranks.device and name in zero.named:
            problem = f"{name} is on {p.device}, others on {ranks.device}: move the model first"
        elif place and twin in zero.named:
            problem = (
                f"{name} and {twin} share memory without being one parameter: tie them (one "
                "Parameter under two names), or give each its own, as by data.clone()"
            )
        elif name in zero.group_of and p.requires_grad and p.dtype not in TRAINABLE:
            problem = f"{name} is {p.dtype}: an FP32 master fits float32, bfloat16 and float16 only"
    about = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in zero.named.items()]
    about += [sorted(zero.group_of.items()), *sorted(arguments.items())]
    # Every rank comes here, whatever it found, so that all of them raise.
    seen = ranks.gather((problem, about))
    for rank, (problem, theirs) in enumerate(seen):
        if problem:
            raise ValueError(f"rank {rank}: {problem}")
        for a, b in itertools.zip_longest(seen[0][1], theirs):
            if a != b:
                raise ValueError(f"model or arguments differ: rank 0 has {a}, rank {rank} has {b}")
    MANAGERS.update((p, weakref.ref(zero)) for p in zero.named.values())


MANAGERS = WeakTensorKeyDictionary()  # parameter -> weak reference to the Zero object that has it


def is_managed(tensor, zero):
    """Whether another Zero object that lives has this parameter."""
    manager = MANAGERS.get(tensor, lambda: None)
    if manager() not in (None, zero):
        gc.collect()  # a forgotten one may only wait for that
    return manager() not in (None, zero)


def extent(tensor):
    """(first byte, the one behind the last): the memory that a tensor's elements lie in."""
    steps = [(n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    length = (sum(steps) + 1) * tensor.element_size() if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + length


# ---- what every stage has besides its mechanism --------------------------------------------------


class _Later:
    """A handler that keeps the first Ctrl-C for later; a second one takes effect at once."""

    def __init__(self, handler):
        self.handler, self.came = handler, None

    def __call__(self, *signal_and_frame):
        if self.came:
            self.handler(*signal_and_frame)
        self.came = signal_and_frame


@contextlib.contextmanager
def uninterrupted():
    """Ctrl-C, as a notebook's interrupt, takes effect at the end of this. A rank that left between
    an agreement and the collective that it announced would leave the others waiting."""
    handler = signal.getsignal(signal.SIGINT)
    here = (
        threading.current_thread() is threading.main_thread()
    )  # Python's signals come nowhere else
    if not here or not callable(handler) or isinstance(handler, _Later):
        yield
        return
    later = _Later(handler)
    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if later.came:
            handler(*later.came)


class Sharded(torch.optim.Optimizer):
    """What a stage has besides its mechanism: state that moves, reports, refusals, and the end.

    A stage brings `_build` and `every`, all buckets, those of frozen parameters too. Stage 3 says
    otherwise what is said here for stages whose parameters are whole all the time.
    """

    def _claim(self):
        self.tier.open(self.ranks.limit)

    def _pieces(self):
        # Lists of buckets that may be whole at the same time.
        return [self.every]

    def _whole(self, buckets):
        # A context in which these buckets are whole.
        return contextlib.nullcontext()

    def _plain(self, param):
        # Leave nothing of ours on a parameter.
        pass

    def _abandon_forward(self):
        # Of a forward that was interrupted, leave nothing.
        pass

    def _abandon_all(self):
        # The same of every use of parameters, on all ranks.
        pass

    @contextlib.contextmanager
    def _guard(self, doing, writes=True):
        """Around what a disk may fail in: if it does on one rank, all ranks raise. What a failed
        write leaves behind is neither old nor new: the optimizer cannot go on then."""
        on_disk = self.tier.may_fail or any(b.home.tier == "nvme" for b in self.every)
        try:
            with self.ranks.together(doing) if on_disk else contextlib.nullcontext():
                yield
        except BaseException as error:
            if writes:
                self._dead = f"{doing} failed half way ({type(error).__name__}: {error})"
                for bucket in self.every:
                    bucket.home.commit(good=False)
            raise

    def add_param_group(self, param_group):
        """Add a group as torch does; its parameters belong to the model. After construction this
        is collective: state and weights are carried over into a new partition."""
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        own, have = {id(p) for p in self.model.parameters()}, {id(p) for p in params}
        if len(have) < len(params):
            raise ValueError("param_groups: a parameter is listed twice in one group; list it once")
        if not have <= own:
            raise ValueError("param_groups: a parameter is not one of model.parameters()")
        if any(id(p) in have for group in self.param_groups for p in group["params"]):
            raise ValueError(
                "param_groups: some parameters appear in more than one parameter group"
            )
        carried = self.state_dict() if self._built else None
        if carried:
            self._unbuild()
        super().add_param_group({**param_group, "params": params})
        if carried:
            self._build()
            fresh = self.state_dict()
            carried["master"] = fresh["master"] | carried["master"]
            carried["param_groups"] = fresh["param_groups"]
            self.load_state_dict(carried)

    @uninterrupted()
    def state_dict(self, rank0_only=False):
        """Everything needed to go on, free of stage, rank count, buckets, dtype and offload, as
        full FP32 tensors on the CPU: {"state": {name: {...}}, "master": {name: tensor},
        "param_groups", counters}. With `rank0_only` the other ranks get {}. Collective.

        Raises RuntimeError in the middle of a window, whose sums would be lost.
        """
        self._finish_backward()
        self._check_going()
        with self.ranks.together("state_dict"):  # in stage 1 only some ranks may be in a window
            if self._calls:
                raise RuntimeError(
                    f"state_dict() in the middle of a window would lose {self._calls} backward "
                    "call(s): step() or zero_grad() first"
                )
        return collect_state(self, rank0_only)

    @uninterrupted()
    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Take rank 0's `state_dict` (the others may give {}), from any stage, rank count and
        offload. Without "master" the weights stay: so a plain torch optimizer's state, keyed by
        name, can be loaded. Drops the window. Collective.

        Raises ValueError that lists every entry that does not fit; nothing is changed then.
        """
        restore_state(self, state_dict)
        self.zero_grad()
        self._refresh_weights(set(self.names))

    @uninterrupted()
    @torch.no_grad()
    def model_state_dict(self):
        """The full model, {name: CPU tensor} as `model.state_dict()` has it. Collective."""
        self.ranks.agree("model_state_dict")
        values = {}
        for buckets in self._pieces():
            with self._whole(buckets):
                for param in itertools.chain(*(bucket.params for bucket in buckets)):
                    values[id(param)] = param.detach().cpu().clone()
        tensors = self.model.state_dict(keep_vars=True).items()
        return {n: values[id(t)] if id(t) in values else copied(t) for n, t in tensors}

    @uninterrupted()
    @torch.no_grad()
    def load_model_state_dict(self, state_dict):
        """Load rank 0's full model (the others may give {}): weights, buffers and FP32 masters.
        Raises ValueError that lists what is missing, extra or misshapen. Collective."""
        ours = self.model.state_dict(keep_vars=True)
        with self.ranks.together("load_model_state_dict"):
            if self.ranks.rank == 0:
                problems = [f"{n} is missing" for n in ours.keys() - state_dict.keys()]
                problems += [f"{n} is not in the model" for n in state_dict.keys() - ours.keys()]
                for name in ours.keys() & state_dict.keys():
                    value, extra = state_dict[name], not torch.is_tensor(ours[name])
                    if not extra and not torch.is_tensor(value):
                        problems.append(f"{name} is a {type(value).__name__}")
                    elif not extra and ours[name].shape != value.shape:
                        shapes = (*value.shape,), (*ours[name].shape,)
                        problems.append(f"{name} is {shapes[0]}, not {shapes[1]}")
                if problems:
                    raise ValueError("load_model_state_dict: " + "; ".join(sorted(problems)))
        for buckets in self._pieces():
            with self._whole(buckets):
                if self.ranks.rank == 0:
                    for bucket in buckets:
                        for name, param in zip(bucket.names, bucket.params, strict=True):
                            param.data.copy_(state_dict[name])
                self._publish(buckets, source=0)
        for name, buffer in self.model.named_buffers():
            if self.ranks.rank == 0 and name in state_dict:
                buffer.copy_(state_dict[name])
            self.ranks.broadcast(buffer)
        extra = [n for n, t in ours.items() if not torch.is_tensor(t)]  # modules' extra state
        if extra and not self.ranks.simulated:
            told = [{n: state_dict.get(n) for n in extra}]
            dist.broadcast_object_list(told, group=self.ranks.control, group_src=0)
            self.model.load_state_dict(told[0], strict=False)

    def _publish(self, buckets, source):
        # Full parameters as rank `source` has them reach every rank, its slice and its masters.
        for bucket in buckets:
            self.ranks.broadcast(bucket.flat, source)
            with self._guard("a change of weights"):
                if bucket.part is not None:
                    bucket.part.write({MASTER: bucket.flat[bucket.mine]})
                else:
                    bucket.home.write(0, bucket.flat[bucket.mine])
                    bucket.home.settle()
                    bucket.home.commit()

    @contextlib.contextmanager
    @torch.no_grad()
    def gathered(self, modifier_rank=None):
        """Full parameters are readable inside. With a modifier rank, its edits reach all ranks and
        the masters; without one an edit is undone and raises RuntimeError on all. Collective."""
        with self._whole(self.every):
            before = [bucket.flat.clone() for bucket in self.every]
            whole = [bucket.flat for bucket in self.every]
            try:
                with self.ranks.together("gathered"):
                    yield
                    if modifier_rank is None and not all(map(same_bits, whole, before)):
                        raise RuntimeError(
                            "parameters were edited inside gathered() without a modifier_rank: say "
                            "whose edits count, as in gathered(modifier_rank=0)"
                        )
            except BaseException:
                for flat, old in zip(whole, before, strict=True):
                    flat.copy_(old)
                raise
            if modifier_rank is not None:
                self._publish(self.every, modifier_rank)

    def memory(self):
        """Live bytes of this rank: {"device"|"host"|"nvme": {"params", "grads", "optimizer"}}."""
        held = {tier: {"params": 0, **kinds} for tier, kinds in self.tier.memory().items()}
        for bucket in self.every:
            for kind, tensor in (("params", bucket.flat), ("grads", bucket.grad)):
                if tensor is not None:
                    held["device"][kind] += tensor.untyped_storage().nbytes()
        return held

    def was_step_applied(self):
        """Whether the last `step()` changed the parameters."""
        return self._applied

    def _unbuild(self):
        for hook in self._hooks:
            hook.remove()
        try:
            self._abandon_all()
            for buckets in self._pieces():
                with self._whole(buckets):
                    params = list(itertools.chain(*(bucket.params for bucket in buckets)))
                    values = [param.data.clone() for param in params]
                for param, value in zip(params, values, strict=True):
                    self._plain(param)
                    param.data, param.grad = value, None
                    MANAGERS.pop(param, None)
        finally:
            self.tier.close()
            self.buckets = self.every = []

    @uninterrupted()
    def close(self):
        """Hooks off, threads ended, files gone; the model is a plain, full module again. Where that
        cannot be, since a rank is dead or a disk lost the weights of stage 3, the rest is done all
        the same, and it raises."""
        if self._dead != "closed":
            self._dead = "closed"
            try:
                self._settle()
            finally:
                self._unbuild()
                self.ranks.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def _check_going(self):
        if self._dead:
            raise RuntimeError(
                f"this optimizer cannot go on: {self._dead}; close() it, construct a new one and "
                "load the last state that was saved"
            )

    def _check_alive(self):
        self._check_going()
        for name, param in self.frozen.items():
            if param.requires_grad and name not in self._idle:
                raise RuntimeError(
                    f"{name} was frozen at construction and requires a gradient now, but has no "
                    "optimizer state: freeze it again, or construct the optimizer anew"
                )

    def _failure(self):
        # Of a backward on this rank: an error for the next exchange, so that all ranks raise.
        if self._spoiled:
            return RuntimeError(f"{self._spoiled}: call zero_grad() to drop its window and go on")
        return None

    def _check_scaled(self):
        due = f"the loss scale {self.loss_scale:g}" if self.loss_scale != 1.0 else None
        if self.managed and self.accumulation_steps > 1:
            due = due or f"1/{self.accumulation_steps} for gradient accumulation"
        if due and not self._announced:
            self._clear_grads()
            raise RuntimeError(
                f"plain loss.backward() would leave out {due}: call zero.backward(loss), or scale "
                "it yourself and call zero.scale(loss).backward()"
            )

    def _check_counting(self):
        if self.managed and 1 < self.accumulation_steps <= self._calls_since_step:
            self._warn(
                f"managed mode counts step() calls, and {self._calls_since_step} backward calls "
                "came since the last one: call step() after every backward; to decide yourself "
                "when a window ends, use managed_gradient_accumulation=False"
            )
        self._calls_since_step = 0

    def _check_dropping(self):
        if self.managed and self.accumulation_steps > 1 and self._calls and not self._spoiled:
            self._warn(
                "zero_grad() in the middle of a managed window drops its gradients; a loop that "
                "calls it after every micro-batch never trains, and step() ends windows by itself"
            )

    def _warn(self, text):
        if text[:16] not in self._warned:  # once
            self._warned.add(text[:16])
            warnings.warn(text, stacklevel=4)
