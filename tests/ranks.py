"""Runs a function on several ranks, as forked processes in one gloo group.

    def work(rank, world, scale):
        total = torch.full((3,), scale * rank)
        dist.all_reduce(total)
        return total

    results = run_ranks(work, 2, 10.0)      # [rank 0's result, rank 1's result]

Forking instead of starting fresh interpreters saves seconds per test, and closures work. Its price:
the parent may use neither several threads (conftest.py sees to it) nor CUDA, and where there is a
GPU no backward() either, since autograd then starts threads. So compute the truth in a rank too:
`alone(fn)` is one plain process.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

_fork = multiprocessing.get_context("fork")


class RankError(AssertionError):
    """Some ranks failed; `errors` maps each of them, first failure first, to its
    (type name, message, traceback). "Hang" and "Died" are types of the harness's own."""

    def __init__(self, world: int, errors: dict[int, tuple[str, str, str]]):
        self.errors = errors
        parts = [f"{len(errors)} of {world} ranks failed; the first is most likely the cause"]
        for rank, (kind, message, stack) in errors.items():
            parts.append(f"--- rank {rank}: {kind}: {message}\n{stack.rstrip()}")
        super().__init__("\n".join(parts))


def run_ranks(fn, world, *args, timeout=60, expect_exit=None, group_limit=30, **kwargs) -> list:
    """Calls fn(rank, world, *args, **kwargs) on `world` ranks; returns their results in rank order.

    Raises RankError if a rank raises, dies or runs for longer than `timeout` seconds; whatever
    happens, no rank outlives the call. A collective fails after `group_limit` seconds. Tensors in
    results arrive on the CPU. expect_exit={rank: code} names ranks that fn kills on purpose (the
    code is negative for a signal); their result is None.
    """
    __tracebackhide__ = True
    if torch.get_num_threads() != 1:
        raise RuntimeError("forked ranks may hang: set OMP_NUM_THREADS=1 before importing torch")
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        call = (fn, args, kwargs)
        processes = [
            _fork.Process(target=_rank_main, args=(rank, world, folder, group_limit, timeout, call))
            for rank in range(world)
        ]
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of threads in a parent that forks; a library's idle one is fine.
                warnings.filterwarnings("ignore", ".*use of fork.*", DeprecationWarning)
                for process in processes:
                    process.start()
            hung = _wait(processes, timeout)
            _dump_stacks([processes[rank] for rank in hung])
        finally:
            _end(processes)
            _show_output(folder, world)
        reports = [_report(folder, rank, process) for rank, process in enumerate(processes)]
        for rank in hung:
            reports[rank] = _hang_report(folder, rank, timeout)
    return _results(reports, expect_exit or {})


def alone(fn, *args, **kwargs):
    """The result of fn(0, 1, *args, **kwargs) in a process of its own: for the plain computation
    that ranks are compared with."""
    __tracebackhide__ = True
    return run_ranks(fn, 1, *args, **kwargs)[0]


def all_raise(fn, world, exc_type, match, within=30, **options) -> list[str]:
    """Requires fn(rank, world) to raise exc_type with a message that matches the pattern `match`
    on every rank `within` seconds; returns the messages. `options` are those of run_ranks."""
    __tracebackhide__ = True
    gate = _fork.Barrier(world)

    def attempt(rank, world):
        start = time.monotonic()
        try:
            with pytest.raises(exc_type, match=match) as caught:
                fn(rank, world)
            seconds = time.monotonic() - start
            assert seconds <= within, f"raised only after {seconds:.1f} s, wanted {within} s"
            # Stay until all have raised: a rank that leaves makes the others raise by that alone.
            gate.wait(within)
        except threading.BrokenBarrierError:
            pass  # another rank is wrong or late, and says so itself
        except BaseException:
            gate.abort()
            raise
        raise _AsWanted(str(caught.value))

    options.setdefault("timeout", within + 5)
    try:
        run_ranks(attempt, world, **options)
    except RankError as failure:
        if any(kind != _AsWanted.__name__ for kind, _, _ in failure.errors.values()):
            raise
        return [failure.errors[rank][1] for rank in range(world)]
    raise AssertionError("expect_exit names every rank")  # else each rank is in RankError


class _AsWanted(Exception):
    """How a rank of all_raise ends; raised, not returned, since a group in which an operation
    failed may wait long for the rest of it when it is taken down in good order."""


def assert_same_everywhere(results):
    """Requires the results of all ranks to be equal to the last bit; returns the first one.
    Goes through dicts, lists, tuples and tensors; NaN equals the same NaN."""
    __tracebackhide__ = True
    for rank, result in enumerate(results[1:], start=1):
        difference = _difference(results[0], result, "result")
        assert not difference, f"rank 0 and rank {rank} differ: {difference}"
    return results[0]


def _difference(a, b, path: str) -> str:
    """Where and how a and b differ, or an empty string."""
    if type(a) is not type(b):
        return f"{path} is a {type(a).__name__} and a {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        return _tensor_difference(a, b, path)
    if isinstance(a, dict):
        if list(a) != list(b):
            return f"{path} has the keys {list(a)} and {list(b)}"
        pairs = [(f"{path}[{key!r}]", a[key], b[key]) for key in a]
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{path} has {len(a)} and {len(b)} items"
        pairs = [(f"{path}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        return "" if a == b or (a != a and b != b) else f"{path} is {a!r} and {b!r}"
    return next(filter(None, (_difference(x, y, where) for where, x, y in pairs)), "")


def _tensor_difference(a: torch.Tensor, b: torch.Tensor, path: str) -> str:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{path} is {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
    # Bytes, not numbers: +0 and -0 differ, NaN equals itself.
    bytes_a, bytes_b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    if torch.equal(bytes_a, bytes_b):
        return ""
    wrong = (bytes_a != bytes_b).reshape(a.numel(), -1).any(dim=1).nonzero().reshape(-1)
    first = int(wrong[0])
    values = f"{a.reshape(-1)[first].item()!r} and {b.reshape(-1)[first].item()!r}"
    return (
        f"{path}: {len(wrong)} of {a.numel()} elements, the first at flat index {first}: {values}"
    )


# The rank's side


def _rank_main(rank, world, folder, group_limit, timeout, call):
    """The life of one rank. Never returns: what pytest set up to run at its end is the parent's.

    A rank that fails leaves at once. Its closed connections make the others fail within
    milliseconds, while taking the group down first would wait for operations still under way.
    """
    _own_output(folder, rank, timeout)
    strays = _catch_strays()
    try:
        torch.manual_seed(1000 + rank)  # ranks that agree do so by the code under test, not by luck
        random.seed(1000 + rank)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=group_limit),
        )
        dist.barrier()  # or a rank that ends early breaks the connections that others still make
        fn, args, kwargs = call
        result = fn(rank, world, *args, **kwargs)
        dist.destroy_process_group()
        assert not strays, "in a thread or a finalizer: " + "; ".join(strays)
        report = _pack({"result": result})
    except BaseException as error:
        report = _pack({"error": _describe(error), "time": time.monotonic()})
    (folder / f"{rank}.report").write_bytes(report)
    sys.stdout.flush()
    os._exit(0)


def _own_output(folder, rank, timeout):
    """Sends all that the rank prints, from Python or from C++, to a file that the parent shows."""
    log = open(folder / f"{rank}.output", "w", buffering=1)  # noqa: SIM115 (open until the end)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    logging.root.handlers[:] = [logging.StreamHandler(log)]  # pytest's would keep it in memory here
    faulthandler.enable(log)
    stacks = open(folder / f"{rank}.stacks", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    # Should the parent itself be killed, the rank still ends.
    faulthandler.dump_traceback_later(timeout + 30, exit=True, file=log)


def _catch_strays() -> list[str]:
    """Collects the exceptions that no caller can catch, those of threads and finalizers."""
    strays: list[str] = []

    def hook(info):
        print(*traceback.format_exception(info.exc_value), sep="")
        strays.append(f"{info.exc_type.__name__}: {info.exc_value}")

    threading.excepthook = sys.unraisablehook = hook
    return strays


def _pack(report: dict) -> bytes:
    buffer = io.BytesIO()
    torch.save(report, buffer)
    return buffer.getvalue()


def _describe(error: BaseException) -> tuple[str, str, str]:
    if error.__traceback__.tb_next:
        error = error.with_traceback(error.__traceback__.tb_next)  # not the line in _rank_main
    return type(error).__name__, str(error), "".join(traceback.format_exception(error))


# The parent's side


def _wait(processes, timeout) -> list[int]:
    """Waits for the processes to end; returns the ranks of those that still run at the limit."""
    deadline = time.monotonic() + timeout
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running and (left := deadline - time.monotonic()) > 0:
        for sentinel in connection.wait(list(running), left):
            del running[sentinel]
    return sorted(running.values())


def _dump_stacks(processes):
    """Has every hung rank write down where it is, before the first of them is killed."""
    for process in processes:
        os.kill(process.pid, signal.SIGUSR1)
    if processes:
        time.sleep(0.5)


def _end(processes):
    for process in processes:
        if process.pid is not None:
            process.kill()
            process.join()


def _show_output(folder, world):
    """Prints what the ranks printed, so that pytest shows it with a failing test."""
    for rank in range(world):
        path = folder / f"{rank}.output"
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            print(f"[rank {rank}] {line}")


def _report(folder, rank, process) -> dict:
    path = folder / f"{rank}.report"
    if process.exitcode == 0 and path.exists():
        # On the CPU whatever it was: the parent must not start CUDA.
        return torch.load(path, map_location="cpu", weights_only=False)
    code = process.exitcode
    cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return {"error": ("Died", cause, ""), "time": 0.0, "exit": code}


def _hang_report(folder, rank, timeout) -> dict:
    path = folder / f"{rank}.stacks"
    stacks = path.read_text() if path.exists() else ""
    error = ("Hang", f"still running after {timeout} s", stacks or "(no stacks)")
    return {"error": error, "time": float("inf")}


def _results(reports: list[dict], expect_exit: dict[int, int]) -> list:
    """The ranks' results, or RankError with the failures in the order in which they happened."""
    __tracebackhide__ = True
    for rank, code in expect_exit.items():
        if reports[rank].get("exit") == code:
            reports[rank] = {"result": None}
        elif "error" not in reports[rank]:
            wrong = ("Survived", f"was to end with exit code {code}, but returned", "")
            reports[rank] = {"error": wrong, "time": 0.0}
    failed = [rank for rank, report in enumerate(reports) if "error" in report]
    failed.sort(key=lambda rank: reports[rank]["time"])
    if failed:
        raise RankError(len(reports), {rank: reports[rank]["error"] for rank in failed})
    return [report["result"] for report in reports]
