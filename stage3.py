"""ZeRO stage 3: optimizer state, gradients and parameters are sharded.

    torchrun --nproc-per-node 2 stage3.py --offload nvme --offload-param nvme

HEADER
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import warnings
import weakref
from collections import Counter, deque

import torch
from torch.nn import Parameter
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

import offload
from offload import Ranks, RanksDisagree

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
        self.part = None  # this rank's FP32 slice: an offload.Partition

    def views(self, flat):
        """[(parameter, its view of `flat` (numel,))], in order."""
        for param, start in zip(self.params, self.offsets, strict=False):
            yield param, flat[start : start + param.numel()].view(param.shape)

    def cuts(self, group_of):
        """[(name, param group, start, end)]: the parts of parameters in this rank's slice."""
        for name, a, b in zip(self.names, self.offsets, self.offsets[1:], strict=False):
            low, high = max(a, self.mine.start), min(b, self.mine.stop)
            if low < high:
                yield name, group_of[name], low - self.mine.start, high - self.mine.start
            elif a == b:  # an empty parameter: every rank counts its steps
                yield name, group_of[name], 0, 0

    def take(self, index, mean, dtype):
        """Move `p.grad` into the flat gradient, times `mean` = 1/N: the mean over ranks is taken
        where a gradient enters, so a finite mean cannot overflow on the way."""
        param = self.params[index]
        if self.grad is None:
            self.grad = torch.empty(self.numel, dtype=dtype, device=param.device)
        start = self.offsets[index]
        piece = self.grad[start : start + param.numel()].view(param.shape)
        if index in self.written:
            piece.add_(param.grad, alpha=mean)
        elif param.grad.dtype == dtype:
            torch.mul(param.grad, mean, out=piece)
        else:
            piece.copy_(param.grad).mul_(mean)
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
    """What a parameter is while its unit is not gathered. Its shape is true and its values are NaN;
    whoever computes with it gets the real values, by a gather on the spot.

    Like `torch.nn.UninitializedParameter`, it changes its class when its values come.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.__name__
        if name in ("__get__", "__set__", "__delete__"):  # a property such as Tensor.shape
            name = func.__self__.__name__
        if name in ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        used = [p for p in tree_leaves((args, kwargs)) if isinstance(p, Released)]
        if (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "data"):
            raise RuntimeError(
                f"{used[0].zero_name} is sharded, and {name} on it would be lost or read nothing: "
                "read and edit it inside `with zero.gathered(modifier_rank=...)`"
            )
        with used[0].zero()._in_use({p.unit for p in used}):
            return func(*args, **kwargs)


# What can be asked of a parameter without its values.
ABOUT = {
    *("shape", "size", "dim", "ndim", "numel", "nelement", "dtype", "device", "layout", "is_leaf"),
    *("requires_grad", "requires_grad_", "grad", "grad_fn", "is_cuda", "is_meta", "is_sparse"),
    *("is_floating_point", "is_complex", "element_size", "itemsize", "get_device", "_version"),
    *("register_hook", "register_post_accumulate_grad_hook", "_backward_hooks", "retains_grad"),
    *("_post_accumulate_grad_hooks", "name", "__hash__", "is_contiguous", "stride", "nbytes"),
}


class Unit:
    """A module whose parameters are gathered and released together: a subtree that fits a bucket,
    or the parameters that a larger module has itself. One bucket per dtype, frozen ones apart."""

    def __init__(self, name, module, index):
        self.name, self.module, self.index = name, module, index
        self.buckets = []
        self.users = 0  # forwards under way
        self.waits, self.full = [], False  # gathers under way; parameters are whole
        self.node = None  # the backward node that asked for it last


class ZeroStage3(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` over the parameters of `model`, ZeRO stage 3.

    Collective: every rank constructs it with the same model and arguments, and rank 0's weights
    and buffers are taken. Raises ValueError, on every rank, for what cannot work.
    """

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
        given = locals()
        offload.check_arguments(given)
        self._check_stage(given)
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
        self.device = next(model.parameters()).device
        self.ranks = Ranks(process_group, self.device, self.traffic)
        self._built, self._applied, self._stepping, self._dead = False, False, False, None
        self._warned = set()
        where = torch.device("cpu") if offload_optimizer else self.device
        options = offload.optimizer_options(optimizer_class, options, self.device, where)
        defaults = optimizer_class([torch.zeros(1)], **options).defaults
        super().__init__(model.parameters() if param_groups is None else param_groups, defaults)
        self._build()

    def _build(self):
        """Name the parameters, lay the trainable ones into buckets, give slices to the tier."""
        named = dict(self.model.named_parameters())
        groups = {id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]}
        self.group_of = {n: groups[id(p)] for n, p in named.items() if id(p) in groups}
        offload.check_model(self.ranks, named, self.group_of, self.optimizer_class)
        self.trainable = {n: p for n, p in named.items() if n in self.group_of and p.requires_grad}
        self.frozen = {n: p for n, p in named.items() if n not in self.trainable}
        self.names = list(self.trainable)
        self._idle = {n for n, p in self.frozen.items() if p.requires_grad}  # in no param group
        self.tier = offload.make_tier(
            self.offload_optimizer, self.device, self.optimizer_class, self.param_groups,
            self.accum_dtype, self.traffic,
        )  # fmt: skip
        self.buckets, self._hooks, self._in_flight, self._tasks = [], [], deque(), set()
        self._open = self._explicit = self._announced = False
        self._spoiled = None
        self._partition()
        self.ranks.words = 3 + max(len(self.names), len(self.buckets))
        with self.ranks.together("construction"):
            self._claim()
        self._new_window()
        self._built = True

    def add_param_group(self, param_group):
        """Add a group as torch does; its parameters belong to the model. After construction this
        is collective: state and weights are carried over into a new partition."""
        carried = self.state_dict() if self._built else None
        if carried:
            self._unbuild()
        super().add_param_group(param_group)
        own, params = {id(p) for p in self.model.parameters()}, self.param_groups[-1]["params"]
        if len({id(p) for p in params}) < len(params):
            raise ValueError("param_groups: a parameter is listed twice in one group; list it once")
        if any(id(p) not in own for p in params):
            raise ValueError("param_groups: a parameter is not one of model.parameters()")
        if carried:
            self._build()
            fresh = self.state_dict()
            carried["master"] = fresh["master"] | carried["master"]
            carried["param_groups"] = fresh["param_groups"]
            self.load_state_dict(carried)

    # --- end ---

    def _check_stage(self, given):
        self.overlap = given["overlap_comm"] is not False

    def _partition(self):
        # Units in the order of the model, buckets in the reverse: backward fills the last first.
        self.weights = offload.Weights(self.offload_param, self.device, self.traffic)
        self._depth, self._saving, self._homes, self._after = 0, None, {}, {}
        self._hot, self._last = [], None  # units whose parameters are here; the one used last
        self.units = self._split(self.model)
        for unit in self.units:
            for key, names in unit.names.items():
                trainable = key[1]
                params = [self.trainable[n] if trainable else self.frozen[n] for n in names]
                bucket = Bucket(names, params, self.ranks)
                bucket.unit, bucket.flat = (
                    unit,
                    torch.zeros(bucket.numel, dtype=key[0], device=self.device),
                )
                for param, piece in bucket.views(bucket.flat):
                    piece.copy_(param.data)
                for param, name in zip(params, names, strict=True):
                    param.unit, param.zero, param.zero_name = unit, weakref.ref(self), name
                self.ranks.broadcast(bucket.flat)
                bucket.home = self.weights.shard(bucket.flat[bucket.mine])
                if trainable:
                    bucket.part = self.tier.partition(bucket.home, list(bucket.cuts(self.group_of)))
                    self._hooks += [self._hook(bucket, i) for i in range(len(names))]
                    self.buckets.insert(0, bucket)
                unit.buckets.append(bucket)
            self._release(unit)
            self._hooks += self._watch(unit.module, unit)
        self._hooks += self._watch(self.model, None)  # last, so that it comes first
        for buffer in self.model.buffers():
            self.ranks.broadcast(buffer.data)

    def _split(self, root):
        """The units of a model. A module without a forward (a ModuleList) is never one: what it
        holds itself belongs to the module around it."""
        units, taken = [], set()

        def new(name, module, params):
            fresh = [(n, p) for n, p in params if id(p) not in taken]
            if fresh:
                unit = Unit(name, module, len(units))
                unit.names = {}
                for n, p in fresh:
                    unit.names.setdefault((p.dtype, n in self.trainable), []).append(n)
                units.append(unit)
                taken.update(id(p) for _, p in fresh)

        def walk(name, module, around):
            inside = [(n, p) for n, p in self._named(module, name) if id(p) not in taken]
            runs = type(module).forward is not torch.nn.Module.forward
            small = sum(p.numel() for _, p in inside) <= self.bucket_size
            if runs and (small or isinstance(module, self.leaf_modules)):
                return new(name, module, inside)
            own = around if not runs else []
            own += self._named(module, name, recurse=False)
            for child_name, child in module.named_children():
                walk(f"{name}.{child_name}".lstrip("."), child, own)
            if runs:
                new(name, module, own)

        walk("", root, [])
        return units

    def _named(self, module, prefix, recurse=True):
        names = {id(p): n for n, p in (self.trainable | self.frozen).items()}
        return [(names[id(p)], p) for p in module.parameters(recurse)]

    def _claim(self):
        self.tier.open()
        self.weights.open()

    # What only stage 3 does: parameters come and go

    def _watch(self, module, unit):
        me = weakref.ref(self)

        def before(module, args):
            if me() is not None:
                me()._enter(unit)

        def after(module, args, output):
            if me() is not None:
                me()._leave(unit)

        return [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, always_call=True),
        ]

    def _enter(self, unit):
        self._depth += 1
        if unit is not None:
            unit.users += 1
        if self._depth == 1:
            self._check_alive()
            # Autograd saves parameters for backward. It gets a note instead, so that their memory
            # can go. Where others have such hooks (a checkpoint), theirs decide what is kept.
            top = torch._C._autograd._top_saved_tensors_default_hooks(False)
            if torch.is_grad_enabled() and top is None:
                self._saving = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
                self._saving.__enter__()
        if unit is not None:
            self._need(unit)

    def _leave(self, unit):
        self._depth -= 1
        if unit is not None:
            unit.users -= 1
            if not unit.users and not in_backward():
                self._release(unit)
        if self._depth == 0:
            if self._saving is not None:
                self._saving.__exit__(None, None, None)
                self._saving = None
            if not in_backward():
                self._release_all()

    def _pack(self, tensor):
        bucket = self._homes.get(tensor.untyped_storage().data_ptr())
        if bucket is None or not tensor.numel():
            return tensor
        return bucket, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        bucket, *layout = packed
        self._need(bucket.unit)
        return bucket.flat.as_strided(*layout)

    @contextlib.contextmanager
    def _in_use(self, units):
        """Parameters outside their own module's forward: gather them for one operation."""
        for unit in sorted(units, key=lambda unit: unit.index):
            unit.users += 1
            self._need(unit)
        try:
            yield
        finally:
            for unit in units:
                unit.users -= 1
                if not unit.users and not self._depth and not in_backward():
                    self._release(unit)

    def _need(self, unit):
        """Make `unit` whole for the computation that comes next, let go of what was used before,
        and gather ahead what followed it last time. One vote per use keeps the ranks together."""
        unit.node = torch._C._current_autograd_node()
        if unit.full and unit is self._last:
            return
        phase = in_backward()  # what followed what is remembered for each phase
        previous, self._last = self._last, unit
        if previous is not None:
            self._after[phase, previous] = unit
        for other in list(self._hot):
            if other not in (unit, previous if phase else unit) and not self._busy(other):
                self._release(other)
        ahead = self._after.get((phase, unit)) if phase or self._depth else None
        ahead = None if ahead is None or ahead in self._hot else ahead
        self._vote(unit, ahead)
        self._arrive(unit)
        following = self._after.get((phase, ahead))
        for bucket in (
            following.buckets if following is not None and following not in self._hot else ()
        ):
            bucket.home.prefetch()

    def _busy(self, unit):
        # Used by a forward under way, or saved by the very node that is being evaluated.
        return unit.users or (
            unit.node is not None and unit.node is torch._C._current_autograd_node()
        )

    def _vote(self, unit, ahead):
        ready = self._next
        while (
            self._open
            and self.overlap
            and ready < len(self.buckets)
            and not self.buckets[ready].waiting
        ):
            ready += 1
        mine = [
            -1 if unit in self._hot else unit.index,
            -1 if ahead is None else ahead.index,
            ready,
        ]
        votes = self.ranks.agree("a parameter gather", mine)
        wanted = [int(i) for i in mine[:2]]
        if (votes[:, :2] != votes[0, :2]).any():  # another order here and there: serve everybody
            wanted = sorted({int(i) for i in votes[:, 0]})
        for index in wanted:
            if index >= 0:
                self._gather(self.units[index])
        for bucket in self.buckets[self._next : int(votes[:, 2].min())]:
            self._start_reduce(bucket)
            self._next += 1

    @torch.no_grad()
    def _gather(self, unit):
        with record_function("zero/all_gather"), torch.inference_mode(False):
            for bucket in unit.buckets:
                if unit not in self._hot:
                    bucket.flat = torch.empty(
                        bucket.numel, dtype=bucket.params[0].dtype, device=self.device
                    )
                    bucket.home.read(bucket.flat[bucket.mine])
                unit.waits.append(self.ranks.all_gather(bucket.flat))
        if unit not in self._hot:
            self._hot.append(unit)

    def _arrive(self, unit):
        while unit.waits:
            unit.waits.pop()()
        if not unit.full:
            unit.full = True
            for bucket in unit.buckets:
                self._homes[bucket.flat.untyped_storage().data_ptr()] = bucket
                for param, piece in bucket.views(bucket.flat):
                    param.__class__ = Parameter
                    param.data = piece
                bucket.versions = [p._version for p in bucket.params]

    def _release(self, unit):
        """Drop the full parameters. What autograd saved by itself keeps its memory and its values."""
        while unit.waits:
            unit.waits.pop()()
        edited = unit.full and [
            n
            for b in unit.buckets
            for n, p, v in zip(b.names, b.params, b.versions, strict=True)
            if p._version != v
        ]
        for bucket in unit.buckets:
            if bucket.flat is not None:
                self._homes.pop(bucket.flat.untyped_storage().data_ptr(), None)
            bucket.flat = None
            nothing = torch.full((), math.nan, dtype=bucket.params[0].dtype, device=self.device)
            for param in bucket.params:
                if type(param) is not Released:
                    param.data = nothing.expand(param.shape)
                    param.__class__ = Released
        unit.full, unit.node = False, None
        if unit in self._hot:
            self._hot.remove(unit)
        if edited:
            raise RuntimeError(
                f"{edited} were edited in place while gathered for use, and the edit is lost: edit "
                "parameters inside `with zero.gathered(modifier_rank=...)`"
            )

    def _release_all(self):
        for unit in [u for u in self._hot if not u.users]:
            self._release(unit)
        self._last = None  # what follows belongs to another phase

    # --- same in every stage: gradients arrive ---
    def _hook(self, bucket, index):
        me = weakref.ref(self)  # the model must not keep a forgotten optimizer alive

        def take(param):
            if me() is not None:
                me()._on_gradient(bucket, index)

        return bucket.params[index].register_post_accumulate_grad_hook(take)

    @torch.no_grad()
    def _on_gradient(self, bucket, index):
        self._begin_backward()
        bucket.take(index, 1 / self.ranks.world, self.accum_dtype)
        self._active.add(bucket.names[index])
        if self.overlap and self._reduces_now():
            self._reduce_ready()

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
        scaled = loss.float() * self.loss_scale
        scaled.register_hook(lambda grad: setattr(self, "_announced", True))
        return scaled

    def _begin_backward(self):
        if not self._open:
            self._check_alive()
            self._check_scaled()
            if self._reduces_now():
                self.ranks.agree("backward")
            self._open, self._finalized, self._next = True, False, 0
            for bucket in self.buckets:
                bucket.waiting = set(range(len(bucket.params)))
        task = torch._C._current_graph_task_id()
        if not self._explicit and task not in self._tasks:  # a plain loss.backward()
            self._tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(self._on_task_end)

    def _on_task_end(self):
        # A reentrant checkpoint runs backwards inside the backward: only the outer one counts.
        if torch._C._current_autograd_node() is None:
            self._finish_backward()

    def _finish_backward(self):
        if self._open and not self._explicit:
            self._end_backward()

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
        while self._next < len(self.buckets) and not self.buckets[self._next].waiting:
            self._start_reduce(self.buckets[self._next])
            self._next += 1

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
        """Reduce what is left when backward ends: buckets that never filled up, with zeros for
        what is missing, and gradients that came after their bucket had gone (a parameter in two
        reentrant checkpoints). Ranks may have seen different branches, so they vote first."""
        left = [(1 + (i < self._next)) * bool(b.written) for i, b in enumerate(self.buckets)]
        votes = self.ranks.exchange("reduce", [self._next, *left], error)
        farthest = int(votes[:, 2].max())
        for bucket in self.buckets[self._next : farthest]:
            self._start_reduce(bucket)  # another rank has sent its share and waits for this one
        self._next = len(self.buckets)
        if votes[:, 1].any():
            self._settle()
            self._spoiled = "the last backward failed"
            return self.ranks.disagree("backward", error)
        for i, bucket in enumerate(self.buckets):
            vote = votes[:, 3 + i].max()
            if vote == 2 or (vote == 1 and i >= farthest):
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
            self._before_norm()
            mine = [self.tier.norm_squared(), *(name in self._active for name in self.names)]
            votes = self.ranks.agree("boundary", mine)
            used = votes[:, 1:].any(dim=0).tolist()
            self._joint = {name for name, yes in zip(self.names, used, strict=True) if yes}
            self.global_grad_norm = math.sqrt(votes[:, 0].sum()) / self.loss_scale
            self.tier.land()
        self._finalized = True

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
            self._micro_steps += 1
            return loss
        self._stepping = True
        try:
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
                self.tier.update(self._joint, min(clip, 1.0) / self.loss_scale, self.ranks.together)
        except BaseException as error:
            self._dead = f"an update failed half way ({type(error).__name__}: {error})"
            raise
        self._refresh_weights(self._joint)
        self._applied = True
        self.global_steps += 1
        self.good_steps += 1
        if self.dynamic_scale and self.good_steps % self.loss_scale_window == 0:
            self.loss_scale *= 2

    def _skip(self):
        # The norm is one number on all ranks, so all of them come here or none.
        old = self.loss_scale
        if self.dynamic_scale:
            self.loss_scale, self.good_steps = max(old / 2, 1.0), 0
        self.skipped_steps += 1
        if self.ranks.rank == 0:
            norm = self.global_grad_norm
            log.warning(
                "step skipped: gradient norm %s, loss scale %g -> %g", norm, old, self.loss_scale
            )

    def was_step_applied(self):
        """Whether the last `step()` changed the parameters."""
        return self._applied

    def zero_grad(self, set_to_none=True):
        """Drop the window, wherever its sums live. Also the way on after a failed backward."""
        if self.managed and self.accumulation_steps > 1 and self._calls and not self._spoiled:
            self._warn(
                "zero_grad() in the middle of a managed window drops its gradients; a loop that "
                "calls it after every micro-batch never trains, and step() ends windows by itself"
            )
        if self._open:  # a plain backward raised here, and the other ranks wait for its end
            self._end_backward(RuntimeError("backward was given up"))
        self._settle()
        self._spoiled = None
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

    def _before_norm(self):
        pass  # every backward has reduced its gradients already

    def _refresh_weights(self, names):
        pass  # every rank keeps its slice; the next forward gathers

    # --- same in every stage: state ---
    def state_dict(self, rank0_only=False):
        """Everything needed to go on, free of stage, rank count, buckets, dtype and offload, as
        full FP32 tensors on the CPU: {"state": {name: {...}}, "master": {name: tensor}, "param_groups",
        counters}. With `rank0_only` the other ranks get {}. Collective.

        Raises RuntimeError in the middle of a window, whose sums would be lost.
        """
        self._finish_backward()
        if self._calls:
            raise RuntimeError(
                f"state_dict() in the middle of a window would lose {self._calls} backward call(s)"
                ": step() or zero_grad() first"
            )
        self.ranks.agree("state_dict")
        return offload.collect_state(self, rank0_only)

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Take rank 0's `state_dict` (the others may give {}), from any stage, rank count and
        offload. Without "master" the weights stay: so a plain torch optimizer's state, keyed by
        name, can be loaded. Collective.

        Raises ValueError that lists every entry that does not fit; nothing is changed then.
        """
        self.zero_grad()
        offload.restore_state(self, state_dict)
        self._refresh_weights(set(self.names))

    # --- end ---

    @torch.no_grad()
    def model_state_dict(self):
        """The full model, {name: CPU tensor} as `model.state_dict()` has it. One unit at a time is
        gathered on the device. Collective."""
        self.ranks.agree("model_state_dict")
        values = {}
        for unit in self.units:
            with self._in_use({unit}):
                for bucket in unit.buckets:
                    values.update({id(p): p.detach().cpu().clone() for p in bucket.params})
        tensors = self.model.state_dict(keep_vars=True).items()
        return {
            n: values[id(t)] if id(t) in values else t.detach().cpu().clone() for n, t in tensors
        }

    def load_model_state_dict(self, state_dict):
        """Load a full model (rank 0's) into weights, buffers and FP32 masters. Collective."""
        with self.gathered(modifier_rank=0):
            if self.ranks.rank == 0:
                self.model.load_state_dict(state_dict)
        for buffer in self.model.buffers():
            self.ranks.broadcast(buffer.data)

    @contextlib.contextmanager
    @torch.no_grad()
    def gathered(self, modifier_rank=None):
        """Full parameters are readable inside. With a modifier rank, its edits reach all ranks and
        the masters; without one an edit is undone and raises RuntimeError on all. Collective."""
        self.ranks.agree("gathered")
        with self._in_use(set(self.units)):
            buckets = [b for unit in self.units for b in unit.buckets]
            before = [b.flat.clone() for b in buckets]
            try:
                with self.ranks.together("gathered"):
                    yield
                    whole = [b.flat for b in buckets]
                    if modifier_rank is None and not all(map(offload.same_bits, whole, before)):
                        raise RuntimeError(
                            "parameters were edited inside gathered() without a modifier_rank: say "
                            "whose edits count, as in gathered(modifier_rank=0)"
                        )
            finally:
                for bucket in buckets:  # edits here are meant
                    bucket.versions = [p._version for p in bucket.params]
            if modifier_rank is not None:
                for bucket in buckets:
                    self.ranks.broadcast(bucket.flat, modifier_rank)
                    if bucket.part is not None:
                        bucket.part.write({"master": bucket.flat[bucket.mine]})
                    else:
                        bucket.home.write(0, bucket.flat[bucket.mine])
                        bucket.home.settle()

    def memory(self):
        """Live bytes of this rank: {"device"|"host"|"nvme": {"params", "grads", "optimizer"}}."""
        held = {tier: {"params": 0, **kinds} for tier, kinds in self.tier.memory().items()}
        for tier, nbytes in self.weights.memory().items():
            held[tier]["params"] += nbytes
        gathered = [b.flat for unit in self._hot for b in unit.buckets]
        held["device"]["params"] += sum(t.untyped_storage().nbytes() for t in gathered)
        grads = [b.grad for b in self.buckets if b.grad is not None]
        held["device"]["grads"] += sum(g.untyped_storage().nbytes() for g in grads)
        return held

    def _unbuild(self):
        for hook in self._hooks:
            hook.remove()
        for unit in self.units:
            with self._in_use({unit}):
                whole = {p: p.data.clone() for bucket in unit.buckets for p in bucket.params}
            for param, value in whole.items():
                param.__class__, param.grad = Parameter, None
                param.data = value
                del param.unit, param.zero, param.zero_name
        self.tier.close()
        self.weights.close()
        self.buckets = self.units = []

    # --- same in every stage: the end ---
    def close(self):
        """Hooks off, threads ended, files gone; the model is a plain, full module again."""
        if self._dead != "closed":
            self._settle()
            self._unbuild()
            self._dead = "closed"

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    # Refusals

    def _check_alive(self):
        if self._dead:
            raise RuntimeError(f"this optimizer cannot go on: {self._dead}; construct a new one")
        if self._spoiled:
            raise RuntimeError(f"{self._spoiled}: call zero_grad() to drop its window and go on")
        for name, param in self.frozen.items():
            if param.requires_grad and name not in self._idle:
                raise RuntimeError(
                    f"{name} was frozen at construction and requires a gradient now, but has no "
                    "optimizer state: freeze it again, or construct the optimizer anew"
                )

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
                f"{self._calls_since_step} backward calls since the last step(): managed mode "
                "counts step() calls, so call it after every backward; to decide yourself when a window "
                "ends, use managed_gradient_accumulation=False"
            )
        self._calls_since_step = 0

    def _warn(self, text):
        if text[:16] not in self._warned:
            self._warned.add(text[:16])
            warnings.warn(text, stacklevel=3)

    # --- end ---
