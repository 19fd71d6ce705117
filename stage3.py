"""ZeRO stage 3: optimizer state, gradients and parameters are sharded.

    torchrun --nproc-per-node 2 stage3.py --offload nvme --offload-param nvme (or python stage3.py)

A unit is a subtree of the model that fits a bucket. Its bucket of parameters, and N = 2 ranks:

    bucket        [......w1......|...w2...|........w3........|pad]
    slices        [          rank 0           |          rank 1          ]
    parameters      rank 0 its slice          |  rank 1 its slice; whole while the unit computes
    gradients       rank 0 its slice          |  rank 1 its slice; the whole bucket for a moment
    FP32 state      rank 0 its slice          |  rank 1 its slice

    forward       gather 0 | compute 0, gather 1 | release 0, compute 1, gather 2 | ...
    backward      the same from the last unit to the first, and each bucket is reduced as it fills
    boundary      norm, overflow     step: update the slices; nobody gathers before the next forward

Bytes on a rank for each parameter, Adam: bf16 model 2/N + 4/N while a window is open + 12/N; FP32
model 4/N + 4/N + 8/N; and the unit in use, the next one and those around them, whole. (ZeRO paper,
arXiv 1910.02054, section 5.3; offload of parameters: ZeRO-Infinity, arXiv 2104.07857.)
Bytes sent in a window of m backwards, in parameter bytes x (N-1)/N: reduce-scatter m, all-gather up
to 2m (section 7.2.2 for m = 1): a backward that needs no weights of a unit does not gather it.

Read first, as data flows: `_split`, `_enter`, `_need`, `_gather`, `_pack`, `_unpack`,
`Bucket.take`, `_on_gradient`, `_vote`; the rest is as in stage 2.

    here                                       DeepSpeed, runtime/zero/
    Unit, _split                               Z3 leaf modules; buckets are made as gradients come
    Released                                   partition_parameters.py: ZeroParamStatus, free_param
    Released.__torch_function__                parameter_offload.py: ZeROOrderedDict
    _enter, _leave                             pre_sub_module_forward_function and its post
    _need, _vote, _gather, _release            PartitionedParameterCoordinator: fetch_sub_module
    gathered                                   GatheredParameters
    _on_gradient, _start_reduce                stage3.py: reduce_ready_partitions_and_remove_grads
    offload.Partition.add                      stage3.py: partition_grads
    finalize_gradient_accumulation_boundary    stage3.py: _get_norm_groups, has_overflow
    _update (offload.Tier.update)              stage3.py: unscale_and_clip_grads, _optimizer_step
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import weakref
from collections import Counter, deque

import torch
from torch.nn import Parameter
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

import offload
from offload import Ranks, RanksDisagree, Sharded

log = logging.getLogger("zero")


def in_backward():
    """Whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


class Bucket:
    """Parameters laid end to end in one flat buffer, padded to a multiple of N elements: rank r
    owns the r-th slice. In DeepSpeed: `flatten_dense_tensors_aligned`, `IPGBucket`."""

    # --- same in every stage: layout ---
    def __init__(self, names, params, ranks):
        self.names, self.params = names, params
        self.offsets = [0, *itertools.accumulate(p.numel() for p in params)]
        shard = max(1, -(-self.offsets[-1] // ranks.world))  # elements of one rank's slice
        self.numel = shard * ranks.world
        self.mine = slice(ranks.rank * shard, (ranks.rank + 1) * shard)
        self.grad = None  # the full gradient (numel,), while there is one
        self.written = set()  # indices of the parameters whose gradient is in it
        self.waiting = set()  # indices whose gradient has not come in this backward yet
        self.flat = None  # the full parameters (numel,), while they are here
        self.home = self.part = None  # this rank's slice of them, and its FP32 state

    def views(self, flat):
        """[(parameter, its view of `flat` (numel,))], in order."""
        for param, start in zip(self.params, self.offsets, strict=False):
            yield param, flat[start : start + param.numel()].view(param.shape)

    def cuts(self, group_of):
        """[(name, param group, start, end)]: the parts of parameters in this rank's slice."""
        cuts, first = [], self.mine.start
        for name, a, b in zip(self.names, self.offsets, self.offsets[1:], strict=False):
            low, high = max(a, first), min(b, self.mine.stop)
            if low < high:
                cuts.append((name, group_of[name], low - first, high - first))
            elif a == b:  # an empty parameter: every rank counts its steps
                cuts.append((name, group_of[name], 0, 0))
        return cuts

    def take(self, index, mean, dtype):
        """Move `p.grad` into the flat gradient, times `mean` = 1/N: the mean over ranks is taken
        where a gradient enters, so a finite mean cannot overflow on the way."""
        param = self.params[index]
        grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
        if self.grad is None:
            self.grad = torch.empty(self.numel, dtype=dtype, device=param.device)
        start = self.offsets[index]
        piece = self.grad[start : start + param.numel()].view(param.shape)
        if index in self.written:
            piece.add_(grad, alpha=mean)
        elif grad.dtype == dtype:
            torch.mul(grad, mean, out=piece)
        else:
            piece.copy_(grad).mul_(mean)
        param.grad = None
        self.written.add(index)
        self.waiting.discard(index)

    def give(self, dtype):
        """Hand over the full gradient (numel,), zeros where there is none, and start afresh."""
        full, self.grad = self.grad, None
        if full is None:
            full = torch.zeros(self.numel, dtype=dtype, device=self.params[0].device)
        else:
            for index, (_, piece) in enumerate(self.views(full)):
                if index not in self.written:
                    piece.zero_()
            full[self.offsets[-1] :].zero_()
        self.written = set()
        return full

    # --- end ---


class Released(Parameter):
    """What a parameter is while its unit is not gathered: its shape is true, its values are NaN,
    and whoever computes with it gathers the unit on the spot. Like `UninitializedParameter` it
    becomes a plain Parameter again, by its class, when its values are here."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name, changes = func.__name__, func.__name__ == "__set__"
        if name in ("__get__", "__set__", "__delete__"):  # of a property such as Tensor.shape
            name = func.__self__.__name__
        if name in NEEDS_NO_VALUES and not (name == "data" and changes):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        used = [p for p in tree_leaves((args, kwargs)) if isinstance(p, Released)]
        target = (kwargs or {}).get("out", args[0])
        edits = changes or name == "__setitem__" or (name[-1] == "_" and name[-2:] != "__")
        if edits and isinstance(target, Released):
            target.refuse(name)
        if used[0].zero() is None:
            raise RuntimeError(
                f"{used[0].zero_name} is sharded and its optimizer is gone: keep it, or close() it"
            )
        zero = used[0].zero()
        with zero._in_use({zero.units[p.unit] for p in used}):
            return func(*args, **(kwargs or {}))

    def refuse(self, what):
        """Raise for what would lose an edit or keep NaN."""
        raise RuntimeError(
            f"{self.zero_name} is sharded, so {what!r} would lose an edit or miss the values: "
            "use `with zero.gathered():`, or gathered(modifier_rank=...) to edit"
        )

    def __deepcopy__(self, memo):
        self.refuse("deepcopy")

    def __reduce_ex__(self, protocol):
        self.refuse("pickle")


NEEDS_NO_VALUES = {
    *("shape", "size", "dim", "ndim", "numel", "nelement", "stride", "is_contiguous", "__hash__"),
    *("dtype", "device", "layout", "itemsize", "nbytes", "element_size", "get_device", "name"),
    *("is_floating_point", "is_complex", "is_cuda", "is_meta", "is_sparse", "is_leaf", "_version"),
    *("requires_grad", "requires_grad_", "grad", "grad_fn", "retains_grad", "register_hook"),
    *("register_post_accumulate_grad_hook", "_post_accumulate_grad_hooks", "_backward_hooks"),
    *("data", "data_ptr", "untyped_storage", "storage", "storage_offset", "__repr__"),  # of the NaN
}


class Unit:
    """Parameters that are gathered and released together: those of a subtree that fits a bucket,
    or those that a larger module holds itself. One bucket per dtype, and one for frozen ones."""

    def __init__(self, index, module):
        self.index, self.module, self.buckets = index, module, []
        self.users = 0  # forwards under way, and other uses
        self.waits = []  # gathers under way
        self.whole = False  # the parameters are views of gathered buffers
        self.node = None  # the backward node that asked for it


class ZeroStage3(Sharded):
    """A `torch.optim.Optimizer` over the parameters of `model`, ZeRO stage 3.

    Collective: every rank constructs it with the same model and arguments, and rank 0's weights
    and buffers are taken. Raises ValueError, on every rank, for what cannot work.
    """

    reduces_in_hooks = False  # of gradients; stage 3 starts reductions when ranks vote

    # --- same in every stage: construction ---
    def __init__(
        self,
        model,
        optimizer_class=torch.optim.AdamW,
        param_groups=None,
        managed_gradient_accumulation=True,
        gradient_accumulation_steps=1,
        gradient_clipping=None,
        loss_scale=1.0,
        initial_loss_scale=2.0**16,
        loss_scale_window=1000,
        reduce_bucket_size=2**22,
        reduce_dtype=torch.float32,
        grad_accum_dtype=torch.float32,
        overlap_comm=None,
        offload_optimizer=None,
        offload_param=None,
        leaf_modules=(),
        process_group=None,
        **options,
    ):
        given = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        offload.check_arguments(given)
        self._check_stage(given)
        skip = ("model", "param_groups", "offload_optimizer", "offload_param", "process_group")
        self.arguments = {name: str(value) for name, value in given.items() if name not in skip}
        self.model, self.optimizer_class = model, optimizer_class
        self.managed = managed_gradient_accumulation
        self.accumulation_steps, self.clip = gradient_accumulation_steps, gradient_clipping
        self.dynamic_scale = loss_scale == "dynamic"
        self.loss_scale = float(initial_loss_scale if self.dynamic_scale else loss_scale)
        self.loss_scale_window, self.good_steps = loss_scale_window, 0
        self.bucket_size, self.leaf_modules = reduce_bucket_size, tuple(leaf_modules)
        self.reduce_dtype, self.accum_dtype = reduce_dtype, grad_accum_dtype
        self.offload_optimizer, self.offload_param = offload_optimizer, offload_param
        self.global_steps, self.skipped_steps, self.global_grad_norm = 0, 0, 0.0
        self.traffic = Counter()
        self.device = next(model.parameters(), torch.empty(0)).device
        self.ranks = Ranks(process_group, self.device, self.traffic)
        self._built, self._applied, self._stepping, self._dead = False, False, False, None
        self._warned = set()
        where = torch.device("cpu") if offload_optimizer else self.device
        options = offload.optimizer_options(optimizer_class, options, self.device, where)
        defaults = optimizer_class([torch.zeros(2, 2)], **options).defaults
        super().__init__(model.parameters() if param_groups is None else param_groups, defaults)
        self._build()

    def _build(self):
        """Name the parameters, lay the trainable ones into buckets, give slices to the tier."""
        self.named = dict(self.model.named_parameters())
        groups = {id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]}
        self.group_of = {n: groups[id(p)] for n, p in self.named.items() if id(p) in groups}
        offload.check_model(self, self.arguments)
        self.trainable = {
            n: p for n, p in self.named.items() if n in self.group_of and p.requires_grad
        }
        self.frozen = {n: p for n, p in self.named.items() if n not in self.trainable}
        self.names = list(self.trainable)
        self._idle = {n for n, p in self.frozen.items() if p.requires_grad}  # in no param group
        self.tier = offload.make_tier(
            self.offload_optimizer, self.device, self.optimizer_class, self.param_groups,
            self.accum_dtype, self.traffic,
        )  # fmt: skip
        self.buckets, self.every, self._hooks = [], [], []
        self._in_flight, self._tasks = deque(), set()
        self._open = self._explicit = self._announced = self._eager = False
        self._spoiled = None
        self._partition()
        self.ranks.words = 5 + max(len(self.names), len(self.buckets))
        self._new_window()
        try:
            with self.ranks.together("construction"):
                self._claim()
        except BaseException:
            self.close()  # the model is plain and whole again
            raise
        self._built = True

    # --- end ---

    def _check_stage(self, given):
        self.overlap = given["overlap_comm"] is not False

    def _partition(self):
        self.weights = offload.Weights(self.offload_param, self.device, self.traffic)
        self._depth, self._saving, self._last = 0, None, None  # forwards around; hooks; unit used
        self._hot, self._next_unit, self._storages = [], {}, {}
        self._packing = [torch.compiler.disable(f) for f in (self._pack, self._unpack)]
        self.units = []
        self._hooks += self._watch(self.model, None)
        for module, names in self._split():
            unit = Unit(len(self.units), module)
            self.units.append(unit)
            kinds = {}
            for name in names:
                param = self.named[name]
                kinds.setdefault((param.dtype, name in self.trainable), []).append(name)
            for (dtype, trainable), names in kinds.items():
                bucket = Bucket(names, [self.named[n] for n in names], self.ranks)
                bucket.unit, bucket.flat = (
                    unit,
                    torch.zeros(bucket.numel, dtype=dtype, device=self.device),
                )
                for name, (param, piece) in zip(names, bucket.views(bucket.flat), strict=True):
                    piece.copy_(param.data)
                    param.unit, param.zero, param.zero_name = unit.index, weakref.ref(self), name
                self.ranks.broadcast(bucket.flat)
                bucket.home = self.weights.shard(bucket.flat[bucket.mine])
                bucket.versions = [p._version for p in bucket.params]
                unit.buckets.append(bucket)
                self.every.append(bucket)
                if trainable:
                    bucket.part = self.tier.partition(bucket.home, bucket.cuts(self.group_of))
                    self.buckets.insert(0, bucket)  # backward fills the last unit first
                    self._hooks += [self._hook(bucket, i) for i in range(len(names))]
            self._release(unit)
            self._hooks += self._watch(module, unit.index)
        for buffer in self.model.buffers():
            self.ranks.broadcast(buffer)

    def _split(self):
        """[(module, names)], the units. A subtree that fits a bucket is one, and so is a leaf
        module. A module without a forward, such as a ModuleList, is none: what it holds itself
        belongs to the module around it."""
        name_of, taken, units = {id(p): n for n, p in self.named.items()}, set(), []

        def fresh(module, recurse):
            names = [name_of[id(p)] for p in module.parameters(recurse)]
            names = [n for n in names if n not in taken]  # a tied one belongs to its first module
            taken.update(names)
            return names

        def walk(module, around):
            runs = type(module).forward is not torch.nn.Module.forward
            names = {name_of[id(p)] for p in module.parameters()} - taken
            small = sum(self.named[n].numel() for n in names) <= self.bucket_size
            if runs and (small or isinstance(module, self.leaf_modules)):
                units.append((module, fresh(module, recurse=True)))
                return
            own = fresh(module, recurse=False)
            inside = own if runs else around
            inside += own if inside is around else []
            if runs:
                units.append((module, own))
            for child in module.children():
                walk(child, inside)

        walk(self.model, [])
        return [(module, names) for module, names in units if names]

    def _claim(self):
        self.tier.open(self.ranks.limit)
        self.weights.open(self.ranks.limit)

    def _pieces(self):
        return [unit.buckets for unit in self.units]

    @contextlib.contextmanager
    def _whole(self, buckets):
        with self._in_use({bucket.unit for bucket in buckets}):
            try:
                yield
            finally:
                for bucket in buckets:  # an edit in here is meant
                    bucket.versions = [p._version for p in bucket.params]

    def _plain(self, param):
        param.__class__ = Parameter
        del param.unit, param.zero, param.zero_name

    def _unbuild(self):
        try:
            super()._unbuild()
        finally:
            self.weights.close()
            self.units = []

    def memory(self):
        """Live bytes of this rank: {"device"|"host"|"nvme": {"params", "grads", "optimizer"}}."""
        held = super().memory()
        for tier, nbytes in self.weights.memory().items():
            held[tier]["params"] += nbytes
        return held

    # Parameters come and go

    def _watch(self, module, index):
        me, entered = weakref.ref(self), []  # weak as in `_hook`: no unit, but its index

        def enter(module, args):
            if me() is not None:
                entered.append(None if index is None else me().units[index])
                me()._enter(entered[-1])

        def leave(module, args, output):
            # Called after an error as well, even one that came before `enter` had its turn.
            if entered and me() is not None:
                me()._leave(entered.pop())

        # Compiled code stops here and goes on after: it must not trace what is not gathered yet.
        enter, leave = (
            torch.compiler.disable(offload.uninterrupted()(hook)) for hook in (enter, leave)
        )
        before = module.register_forward_pre_hook(enter, prepend=index is None)
        return [before, module.register_forward_hook(leave, always_call=True)]

    def _enter(self, unit):
        self._depth += 1
        if unit is not None:
            unit.users += 1
        if self._depth == 1:
            self._saving = contextlib.ExitStack()
            self._check_alive()
            self._saving.enter_context(self._notes())
        if unit is not None:
            self._need(unit)

    def _leave(self, unit):
        self._depth -= 1
        if unit is not None:
            unit.users -= 1
            if not unit.users and not in_backward():
                self._release(unit)
        if self._depth == 0:
            self._saving.close()
            if not in_backward():
                self._release_all()

    def _abandon_forward(self):
        # Modules call `leave` after an Exception, but not after an interrupt.
        if self._depth:
            self._saving.close()
            self._depth = 0
            for unit in self.units:
                unit.users = 0
            self._release_all()

    def _abandon_all(self):
        # Interrupted ranks come here at different moments: one that is on its way still hears that
        # another closes, in whatever vote it casts, gives up, and comes too.
        self._abandon_forward()
        for unit in self.units:
            unit.users = 0
        self._release_all()
        closing = False
        while not closing:
            with contextlib.suppress(offload.RanksDisagree):
                self.ranks.agree("close")
                closing = True

    def _notes(self):
        # Autograd would keep the parameters that it saves for backward: it gets a note instead.
        # A checkpoint around us has such hooks too, and decides itself what is kept.
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(*self._packing)

    def _pack(self, tensor):
        bucket = self._storages.get(tensor.untyped_storage())
        if bucket is None:
            return tensor
        layout = tensor.size(), tensor.stride(), tensor.storage_offset()
        return bucket, self.global_steps, layout

    def _unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        bucket, steps, layout = packed
        if steps != self.global_steps:
            raise RuntimeError(f"{bucket.names} were updated between this forward and its backward")
        self._need(bucket.unit)
        return bucket.flat.as_strided(*layout)

    @contextlib.contextmanager
    def _in_use(self, units):
        """Gather units for something else than their own module's forward."""
        entered = []
        try:
            for unit in sorted(units, key=lambda unit: unit.index):
                entered.append(unit)
                unit.users += 1
                self._need(unit)
            with self._notes():
                yield
        finally:
            for unit in entered:
                unit.users -= 1
                if not unit.users and not self._depth and not in_backward():
                    self._release(unit)

    def _need(self, unit):
        """Make `unit` whole for what comes next, let go of what was used before it, and gather
        ahead what followed it last time. One vote per use keeps the ranks together."""
        unit.node = torch._C._current_autograd_node()
        if unit.whole and unit is self._last:
            return
        phase, previous = in_backward(), self._last
        if previous is not None:
            self._next_unit[phase, previous] = unit
        for other in list(self._hot):
            if other is not unit and not self._busy(other):
                self._release(other)
        self._last = unit
        ahead = self._next_unit.get((phase, unit)) if phase or self._depth else None
        self._vote(unit, None if ahead in self._hot else ahead)
        self._arrive(unit)
        after = self._next_unit.get((phase, ahead))
        for bucket in after.buckets if after is not None else ():
            bucket.home.prefetch()  # from disk, two uses ahead

    def _busy(self, unit):
        # In a forward under way, asked for by the very node that autograd is evaluating, or the
        # last one in a backward that still owes gradients: its own nodes come next.
        node = torch._C._current_autograd_node()
        owes = node is not None and unit is self._last and any(b.waiting for b in unit.buckets)
        return unit.users or owes or (node is not None and unit.node is node)

    def _vote(self, unit, ahead):
        """Tell the other ranks which unit is missing here, which one to gather ahead and how many
        buckets of gradients are ready; do together what all can do."""
        ready = self._next
        while self._open and self._is_ready(ready):
            ready += 1
        mine = [
            -1 if unit in self._hot else unit.index,
            -1 if ahead is None else ahead.index,
            ready,
        ]
        wanted, error = mine[:2], self._fetch(mine[:2])
        votes = self.ranks.agree("gather of parameters", mine, error)
        if (votes[:, :2] != votes[0, :2]).any():  # other orders on other ranks: serve all
            wanted = sorted({int(i) for i in votes[:, 0]})
            self.ranks.agree("gather of parameters", error=self._fetch(wanted))
        for index in wanted:
            if index >= 0:
                self._gather(self.units[index])
        while self._next < votes[:, 2].min():
            self._start_reduce(self.buckets[self._next])
            self._next += 1

    def _fetch(self, wanted):
        # Own slices come from a disk before the vote, so that all ranks hear if that fails.
        try:
            for bucket in itertools.chain(*(self.units[i].buckets for i in wanted if i >= 0)):
                if bucket.flat is None:
                    bucket.home.fetch()
        except OSError as error:
            return error

    @torch.no_grad()
    @torch.inference_mode(False)
    def _gather(self, unit):
        with record_function("zero/all_gather"):
            for bucket in unit.buckets:
                if bucket.flat is None:
                    dtype = bucket.params[0].dtype
                    bucket.flat = torch.empty(bucket.numel, dtype=dtype, device=self.device)
                    mine = bucket.flat[bucket.mine]
                    bucket.home.read(mine)
                    self.traffic["host_to_device"] += mine.nbytes * (bucket.home.tier != "device")
                unit.waits.append(self.ranks.all_gather(bucket.flat))
        if unit not in self._hot:
            self._hot.append(unit)

    @torch.inference_mode(False)
    def _arrive(self, unit):
        while unit.waits:
            unit.waits.pop()()
        if unit.whole:
            return
        unit.whole = True
        for bucket in unit.buckets:
            self._storages[bucket.flat.untyped_storage()] = bucket
            for param in bucket.params:
                param.__class__ = Parameter
        edited = self._edited(unit)
        for param, piece in itertools.chain(*(b.views(b.flat) for b in unit.buckets)):
            param.data = piece
        self._refuse_edits(unit, edited)

    @torch.inference_mode(False)
    def _release(self, unit):
        """Let the full parameters go. What autograd saved by itself stays as it is."""
        while unit.waits:
            unit.waits.pop()()
        edited = self._edited(unit) if unit.whole else []
        for bucket in unit.buckets:
            if bucket.flat is not None:
                self._storages.pop(bucket.flat.untyped_storage(), None)
            nan = torch.full((), math.nan, dtype=bucket.params[0].dtype, device=self.device)
            for param in bucket.params:
                if type(param) is not Released:
                    param.data = nan.expand(param.shape)
                    param.__class__ = Released
            bucket.flat = None
        unit.whole, unit.node = False, None
        if unit in self._hot:
            self._hot.remove(unit)
        self._refuse_edits(unit, edited)

    def _edited(self, unit):
        # In-place edits count in `_version`, also those through a view, also those of the NaN.
        pairs = [
            (name, param._version != version)
            for bucket in unit.buckets
            for name, param, version in zip(
                bucket.names, bucket.params, bucket.versions, strict=True
            )
        ]
        return [name for name, changed in pairs if changed]

    def _refuse_edits(self, unit, edited):
        for bucket in unit.buckets:
            bucket.versions = [p._version for p in bucket.params]
        if edited:
            raise RuntimeError(
                f"{edited} were edited in place outside gathered(), and the edit is lost: use "
                "`with zero.gathered(modifier_rank=...):`"
            )

    def _release_all(self):
        self._last = None  # what comes next belongs to another phase
        for unit in list(self._hot):
            if not unit.users:
                self._release(unit)

    # --- same in every stage: gradients arrive ---
    def _hook(self, bucket, index):
        # The model, which keeps its hooks, must not keep a forgotten optimizer's state alive.
        me, its = weakref.ref(self), weakref.ref(bucket)

        def take(param):
            if me() is not None:
                me()._on_gradient(its(), index)

        return bucket.params[index].register_post_accumulate_grad_hook(take)

    @offload.uninterrupted()
    @torch.no_grad()
    def _on_gradient(self, bucket, index):
        self._begin_backward()
        bucket.take(index, 1 / self.ranks.world, self.accum_dtype)
        self._active.add(bucket.names[index])
        if self._eager:
            self._reduce_ready()

    @offload.uninterrupted()
    def backward(self, loss, gradient=None, scale_wrt_gas=True, retain_graph=False):
        """Scale the loss, by the loss scale and, managed and unless `scale_wrt_gas=False`, by
        1/gradient_accumulation_steps, and run backward. DeepSpeed: `engine.backward`.

        Returns the loss as scaled by the accumulation factor, detached. If backward raises on one
        rank all ranks raise, and `zero_grad()` is enough to go on.
        """
        self._finish_backward()
        if self.managed and scale_wrt_gas and self.accumulation_steps > 1:
            loss = loss / self.accumulation_steps
        self._explicit = self._announced = True
        try:
            self._begin_backward()
            scaled = loss if self.loss_scale == 1.0 else loss.float() * self.loss_scale
            scaled.backward(gradient, retain_graph=retain_graph)
        except RanksDisagree:  # on every rank: nobody waits for anybody
            self._give_up_backward()
            raise
        except BaseException as error:
            if self._open:
                self._end_backward(error)
            raise
        else:
            self._end_backward()
        finally:
            self._explicit = self._announced = False
        return loss.detach()

    def scale(self, loss):
        """The loss times the loss scale, for `zero.scale(loss).backward()`."""
        scale = self.loss_scale

        def announce(grad):
            if scale != self.loss_scale:
                raise RuntimeError(
                    f"scale() used {scale:g}, now it is {self.loss_scale:g}: call it again"
                )
            self._announced = True
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: setattr(self, "_announced", False))

        scaled = loss.float() * scale
        scaled.register_hook(announce)
        return scaled

    def _begin_backward(self):
        if not self._open:
            self._check_alive()
            self._check_scaled()
            if self._reduces_now():
                self.ranks.agree("backward", error=self._failure())
            self._open, self._finalized, self._next = True, False, 0
            self._eager = self._reduces_now() and self.reduces_in_hooks
            for bucket in self.buckets:
                bucket.waiting = set(range(len(bucket.params)))
        if not self._explicit:
            self._watch_end()

    def _watch_end(self, *_):
        # Of a plain loss.backward(): autograd calls back when its run, a graph task, has succeeded.
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(self._on_task_end)

    @offload.uninterrupted()
    def _on_task_end(self):
        node = torch._C._current_autograd_node()
        if node is not None:  # a reentrant checkpoint's own run: the one around it goes on
            node.register_hook(self._watch_end)
        elif self._open and not self._explicit:
            self._end_backward()

    def _finish_backward(self):
        self._abandon_forward()
        if self._open and not self._explicit:  # nobody called back
            self._end_backward(
                RuntimeError(
                    "loss.backward() raised: call zero_grad() to drop its window and go on"
                )
            )

    def _give_up_backward(self):
        if self._open:
            self._open, self._spoiled = False, "the last backward failed"
            self._settle()

    # --- end ---

    def _reduces_now(self):
        return True  # on every backward, unit by unit

    def _end_backward(self, error=None):
        self._open = False
        self._tasks.clear()
        self._reduce_pending(error)
        self._release_all()
        if error is None:
            self._count_call()

    # --- same in every stage: reductions ---
    def _reduce_ready(self):
        # Start each bucket that is complete and has no incomplete one before it: the same order on
        # all ranks, in whatever order their gradients come.
        while self._is_ready(self._next):
            self._start_reduce(self.buckets[self._next])
            self._next += 1

    def _is_ready(self, index):
        return index < len(self.buckets) and not self.buckets[index].waiting

    def _start_reduce(self, bucket):
        with record_function("zero/reduce_scatter"):
            full = bucket.give(self.accum_dtype).to(self.reduce_dtype)
            self._in_flight.append((bucket, self.ranks.reduce_scatter(full)))
        self._settle(keep=2 if self.overlap else 0)

    def _settle(self, keep=0):
        while len(self._in_flight) > keep:
            bucket, wait = self._in_flight.popleft()
            bucket.part.add(wait())

    @torch.no_grad()
    def _reduce_pending(self, error=None):
        """Reduce what is left when backward ends. If buckets went as they filled up, the others
        follow now, zeros for what is missing: ranks that took other branches wait for them. Then
        all vote which buckets hold something still, such as the second gradient of a parameter in
        two reentrant checkpoints, and reduce those."""
        for bucket in self.buckets[self._next :] if self._eager else ():
            self._start_reduce(bucket)
        self._eager = False
        votes = self.ranks.exchange("reduce", [bool(b.written) for b in self.buckets], error)
        if votes[:, 1].any():
            self._settle()
            self._spoiled = "the last backward failed"
            self.ranks.disagree("backward", error)
        for bucket, left in zip(self.buckets, votes[:, 2:].any(dim=0).tolist(), strict=False):
            if left:
                self._start_reduce(bucket)
        self._settle()

    # --- end ---

    # --- same in every stage: the boundary ---
    def _count_call(self):
        self._calls += 1
        self._calls_since_step += 1
        self._announced = False
        if self.managed and self.is_gradient_accumulation_boundary():
            self.finalize_gradient_accumulation_boundary()

    def is_gradient_accumulation_boundary(self):
        """Whether this micro-step ends the window. Unmanaged: true only while `step()` runs."""
        if not self.managed:
            return self._stepping
        if self._override is not None:
            return self._override
        return self._micro_steps + 1 >= self.accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary):
        """Overrule the counter until the window closes. RuntimeError when unmanaged."""
        if not self.managed:
            raise RuntimeError(
                "set_gradient_accumulation_boundary() has no meaning with "
                "managed_gradient_accumulation=False, where step() is the boundary"
            )
        self._override = bool(is_boundary)

    @property
    def micro_steps(self):
        """Micro-steps pending in this window: step() calls when managed, else backward calls."""
        return self._micro_steps if self.managed else self._calls

    @offload.uninterrupted()
    @torch.no_grad()
    def finalize_gradient_accumulation_boundary(self):
        """The work that belongs to the end of a window: which parameters got a gradient on any
        rank, the global norm and with it the overflow check, the FP32 copy to host or NVMe.

        Managed: done at the end of the boundary's backward. Unmanaged: deferred to `step()`, or to
        an earlier call of this. Idempotent; a backward after it opens the window again. Raises
        RuntimeError off the boundary in managed mode.
        """
        if self.managed and not self.is_gradient_accumulation_boundary():
            raise RuntimeError(
                f"no gradient accumulation boundary: {self._micro_steps} of "
                f"{self.accumulation_steps} micro-steps are done; call step() after each backward, "
                "or set_gradient_accumulation_boundary(True) first"
            )
        self._finish_backward()
        self._check_alive()
        if self._finalized:
            return
        with record_function("zero/boundary"):
            self._before_norm(self._failure())
            mine = [self.tier.norm_squared(), *(name in self._active for name in self.names)]
            votes = self.ranks.agree("boundary", mine, self._failure())
            used = votes[:, 1:].any(dim=0).tolist()
            self._joint = {name for name, yes in zip(self.names, used, strict=True) if yes}
            self.global_grad_norm = math.sqrt(votes[:, 0].sum()) / self.loss_scale
            self.tier.land(self._guard)
        self._finalized = True

    @offload.uninterrupted()
    @torch.no_grad()
    def step(self, closure=None):
        """At a boundary, end the window and update. Returns the closure's loss, or None.

        A window without a gradient is no update, and one whose norm is not finite is skipped on
        every rank; `was_step_applied()` tells. DeepSpeed: `engine.step`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._finish_backward()
        self._check_alive()
        self._check_counting()
        self._applied = False
        if self.managed and not self.is_gradient_accumulation_boundary():
            self._micro_steps += self._calls > 0  # an empty window stays empty
            return loss
        self._stepping = True
        try:
            if self._finalized:
                self.ranks.agree("step", error=self._failure())
            self.finalize_gradient_accumulation_boundary()
            if self._joint and math.isfinite(self.global_grad_norm):
                self._update()
            elif self._joint:
                self._skip()
        finally:
            self._stepping = False
        self._new_window()
        return loss

    def _update(self):
        # Clipping as in clip_grad_norm_, and unscaling, in one factor.
        clip = self.clip / (self.global_grad_norm + 1e-6) if self.clip else 1.0
        try:
            with record_function("zero/update"):
                self.tier.update(self._joint, min(clip, 1.0) / self.loss_scale, self._guard)
            self._refresh_weights(self._joint)
        except BaseException as error:
            self._dead = f"an update failed half way ({type(error).__name__}: {error})"
            raise
        self._applied = True
        self.global_steps += 1
        self.good_steps += 1
        if self.dynamic_scale and self.good_steps % self.loss_scale_window == 0:
            self.loss_scale *= 2

    def _skip(self):
        # The norm is one number on all ranks, so all of them come here or none.
        old = self.loss_scale
        if self.dynamic_scale:
            self.loss_scale, self.good_steps = old / 2, 0
        self.skipped_steps += 1
        if self.ranks.rank == 0:
            norm = self.global_grad_norm
            log.warning(
                "step skipped: gradient norm %s, loss scale %g -> %g", norm, old, self.loss_scale
            )

    @offload.uninterrupted()
    def zero_grad(self, set_to_none=True):
        """Drop the window, wherever its sums live. Also the way on after a failed backward."""
        self._check_dropping()
        self._abandon_forward()
        if self._open:  # a plain backward raised here, and the other ranks wait for its end
            with contextlib.suppress(RuntimeError):
                self._end_backward(RuntimeError("backward was given up"))
        self._settle()
        self._spoiled, self._announced = None, False
        self._clear_grads()
        self._new_window()

    def _new_window(self):
        self.tier.drop()
        for bucket in self.buckets:
            bucket.grad, bucket.written = None, set()
        self._active, self._joint = set(), set()  # parameters with a gradient: here, on any rank
        self._calls = self._calls_since_step = self._micro_steps = 0
        self._override, self._finalized, self._next = None, False, 0

    def _clear_grads(self):
        for param in self.trainable.values():
            param.grad = None

    # --- end ---

    def _before_norm(self, error):
        pass  # every backward has reduced its gradients already

    def _refresh_weights(self, names):
        pass  # every rank keeps its slice; the next forward gathers


if __name__ == "__main__":
    from notebooks.demo import main  # a small transformer, and this file's optimizer

    main(ZeroStage3)
