"""ZeRO stage 1: optimizer state is sharded, gradients and parameters are whole.

    torchrun --nproc-per-node 2 stage1.py --mode unmanaged --offload cpu     (or: python stage1.py)

One bucket of parameters, laid end to end and padded, and N = 2 ranks:

    bucket        [......w1......|...w2...|........w3........|pad]
    slices        [          rank 0           |          rank 1          ]
    parameters      both ranks hold all of it
    gradients       both ranks hold all of it, from the first backward to the boundary
    FP32 state      rank 0 its slice          |  rank 1 its slice

    window        backward | backward | ... | boundary                       | step
                  sums grow on each rank    | reduce-scatter, norm, overflow | update, all-gather

Bytes on a rank for each parameter, Adam: bf16 model 2 + 4 while a window is open + 12/N; FP32 model
4 + 4 + 8/N, since an FP32 slice is its own master. (ZeRO paper, arXiv 1910.02054, section 5.1:
gradients in 2 bytes there, `grad_accum_dtype` here.)
Bytes sent in a window of m backwards, in parameter bytes x (N-1)/N: reduce-scatter 1, all-gather 1
(section 7.2.1), however large m is. Gradients travel in `reduce_dtype`, FP32 by default.

Read first, as data flows: `Bucket.take`, `_on_gradient`, `_reduce_pending`,
`finalize_gradient_accumulation_boundary`, `step`, `_update`, `_refresh_weights`. Then
`diff stage1.py stage2.py`: when gradients are reduced is all the difference.

    here                                       DeepSpeed, runtime/zero/stage_1_and_2.py
    Bucket, _fill                              flatten_dense_tensors_aligned
    _reduce_pending, _start_reduce             reduce_gradients, average_tensor
    finalize_gradient_accumulation_boundary    scaled_global_norm, has_overflow
    _update (offload.Tier.update)              unscale_and_clip_grads, _optimizer_step
    _refresh_weights                           all_gather_dp_groups
    is_/set_gradient_accumulation_boundary     the same names, runtime/engine.py
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import weakref
from collections import Counter, deque

import torch
from torch.profiler import record_function

import offload
from offload import Ranks, RanksDisagree, Shard, Sharded

log = logging.getLogger("zero")


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


class ZeroStage1(Sharded):
    """A `torch.optim.Optimizer` over the parameters of `model`, ZeRO stage 1.

    Collective: every rank constructs it with the same model and arguments, and rank 0's weights
    and buffers are taken. Raises ValueError, on every rank, for what cannot work.
    """

    reduces_in_hooks = True  # of gradients; stage 3 starts reductions when ranks vote

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
        for name in ("offload_param", "leaf_modules"):
            if given[name]:
                raise ValueError(f"{name}= is for stage 3, which shards parameters: use ZeroStage3")
        managed = given["managed_gradient_accumulation"]
        if given["overlap_comm"] and not managed:
            raise ValueError(
                "overlap_comm=True with managed_gradient_accumulation=False: stage 1 reduces once "
                "a window, and unmanaged nobody knows which backward is the last, so there is "
                "nothing to overlap with: leave overlap_comm out, or let the optimizer count"
            )
        self.overlap = managed and given["overlap_comm"] is not False

    def _partition(self):
        for named in (self.trainable, self.frozen):
            for names in self._fill(named):
                bucket = Bucket(names, [named[n] for n in names], self.ranks)
                kind = bucket.params[0].dtype
                bucket.flat = torch.zeros(bucket.numel, dtype=kind, device=self.device)
                for param, piece in bucket.views(bucket.flat):
                    param.data = piece.copy_(param.data)  # from now on a view of the buffer
                self.ranks.broadcast(bucket.flat)
                bucket.home = Shard(bucket.flat[bucket.mine])
                self.every.append(bucket)
                if named is self.trainable:
                    bucket.part = self.tier.partition(bucket.home, bucket.cuts(self.group_of))
                    self.buckets.append(bucket)
                    self._hooks += [self._hook(bucket, i) for i in range(len(names))]
        for buffer in self.model.buffers():
            self.ranks.broadcast(buffer)

    def _fill(self, named):
        # In backward the last parameters come first. One bucket per dtype is open at a time, and
        # buckets are numbered, and later reduced, in the order in which they fill up.
        filling, full, size = {}, [], Counter()
        for name, param in reversed(named.items()):
            if param.dtype in filling and size[param.dtype] + param.numel() > self.bucket_size:
                full.append(filling.pop(param.dtype))
                size[param.dtype] = 0
            filling.setdefault(param.dtype, []).append(name)
            size[param.dtype] += param.numel()
        return full + list(filling.values())

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
        return self.managed and self.is_gradient_accumulation_boundary()  # once a window

    def _end_backward(self, error=None):
        self._open = False
        self._tasks.clear()
        if error is None:
            self._count_call()
        elif self._reduces_now():
            self._reduce_pending(error)  # the other ranks are in it
        else:
            self._spoiled = "the last backward failed"

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
        self._reduce_pending(error)  # the window's only reduce-scatter

    def _refresh_weights(self, names):
        # Every rank has updated its own slice: all-gather the buckets that hold one of `names`.
        with record_function("zero/all_gather"):
            touched = [b for b in self.buckets if not names.isdisjoint(b.names)]
            for wait in [self.ranks.all_gather(bucket.flat) for bucket in touched]:
                wait()


if __name__ == "__main__":
    from notebooks.demo import main  # a small transformer, and this file's optimizer

    main(ZeroStage1)
