"""Processes that die and are interrupted, and what notebooks do: the others end with an error, what
goes on is right to the last bit, and no thread, process or folder stays behind."""

import contextlib
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import nvme
import offload
from faults import (
    EVERYWHERE,
    LIMIT,
    backward,
    make,
    raised_by,
    say,
    settled,
    times,
    train,
    trained,
    values,
)
from models import Odd, assert_same, build, rows
from offload import RanksDisagree
from ranks import assert_same_everywhere, run_ranks

ROOT = Path(nvme.__file__).parent


# --- SIGKILL of one rank ---

MOMENTS = ["forward", "reduce", "update", "swap", "gather", "vote", "any time"]


def arm(zero, model, moment, dice, last_words):
    """This process will end by SIGKILL, soon and at a random one of such moments."""
    left = itertools.count(dice.randrange(1, 30), -1)

    def die():
        last_words.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def count():
        if next(left) == 0:
            die()

    def around(owner, name):
        real, before = getattr(owner, name), dice.random() < 0.5

        def call(*args, **more):
            if before:
                count()
            result = real(*args, **more)
            if not before:
                count()
            return result

        setattr(owner, name, call)

    if moment == "forward":
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: count(), prepend=dice.random() < 0.5)
    elif moment == "reduce":
        around(zero.ranks, "reduce_scatter")
    elif moment == "gather":
        around(zero.ranks, "all_gather")
    elif moment == "vote":
        around(zero.ranks, "exchange")
    elif moment == "update":
        around(offload.Group, "step")
    elif moment == "swap":
        around(os, dice.choice(["preadv", "pwritev"]))
    else:
        timer = threading.Timer(dice.random() * 0.2, die)
        timer.daemon = True
        timer.start()


@pytest.mark.parametrize(("stage", "home", "weights"), EVERYWHERE)
def test_when_a_rank_is_killed_the_others_end_with_an_error(stage, home, weights, tmp_path):
    """In forward, in reduce, in the update, in a swap, anywhere; what it leaves on disk the next
    run removes."""
    moments = [m for m in MOMENTS if m != "swap" or home == "nvme"]
    slowest = 0.0

    def work(rank, world, seed, victim, moment):
        last_words = tmp_path / f"{seed}"
        zero, model = make(stage, tmp_path / "disk", home=home, weights=weights)
        train(zero, model, rank)
        dist.barrier()
        if rank == victim:
            arm(zero, model, moment, random.Random(seed), last_words)
        error = raised_by(lambda: train(zero, model, rank, 10_000), within=3 * LIMIT)
        waited = time.monotonic() - float(last_words.read_text())
        assert isinstance(error, (RuntimeError, OSError)), repr(error)
        del error
        start = time.monotonic()
        with contextlib.suppress(RuntimeError):  # stage 3 cannot be whole without the dead rank
            zero.close()
        waited = max(waited, time.monotonic() - start)
        assert waited < LIMIT and not settled()
        (tmp_path / f"{seed}.{rank}").write_text(str(waited))
        os._exit(8)  # a group in which an operation failed is not taken down in good order

    home_number = [tier for _, tier, _ in EVERYWHERE].index(home)
    for number in range(times(1, 50)):
        seed = number + 3 * stage + home_number
        dice, moment = random.Random(1000 + seed), moments[seed % len(moments)]
        world = dice.choice((2, 3))
        victim = dice.randrange(world)
        exits = dict.fromkeys(range(world), 8) | {victim: -signal.SIGKILL}
        run_ranks(
            work, world, seed, victim, moment,
            timeout=4 * LIMIT, group_limit=LIMIT, expect_exit=exits,
        )  # fmt: skip
        waits = [float(path.read_text()) for path in tmp_path.glob(f"{seed}.*")]
        assert len(waits) == world - 1
        slowest = max(slowest, *waits)
        if home == "nvme":
            assert os.listdir(tmp_path / "disk"), "the killed rank had a folder"
            nvme.Disk(tmp_path / "disk").close()
            assert os.listdir(tmp_path / "disk") == []
    say(f"kill: stage {stage}, state {home}, weights {weights}: {number + 1} kills, "
        f"the others ended after at most {slowest:.2f} s")  # fmt: skip


# --- folders ---


def test_two_runs_on_one_path_at_once(tmp_path):
    """Four ranks, two groups that know nothing of each other, one folder."""

    def work(rank, world):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = {"process_group": groups[rank // 2]}
        found = trained(3, tmp_path, rank % 2, 4, home="nvme", weights="nvme", **mine)
        dist.barrier()
        return found

    assert_same_everywhere(run_ranks(work, 4, timeout=30))
    assert os.listdir(tmp_path) == []


def ended_by(signal_number, body):
    """The exit code of a forked process that runs body(), then sends itself a signal and waits."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            kept = body()
            os.kill(os.getpid(), signal_number)
            time.sleep(5)
            del kept
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_sigterm_removes_the_folder_and_ends_the_process(tmp_path):
    def body():
        disk = nvme.Disk(tmp_path)
        disk.file("w", 4096).write(torch.zeros(4096, dtype=torch.uint8), 0)
        assert os.listdir(tmp_path)
        return disk

    assert ended_by(signal.SIGTERM, body) == -signal.SIGTERM
    assert os.listdir(tmp_path) == []
    assert ended_by(signal.SIGKILL, body) == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 1  # and the next run sees that it is dead:
    assert ended_by(signal.SIGTERM, body) == -signal.SIGTERM
    assert os.listdir(tmp_path) == []


def test_sigterm_is_left_to_whoever_handles_it_and_given_back(tmp_path):
    def plan(number, frame):
        raise AssertionError

    for handler in (signal.SIG_DFL, plan, signal.SIG_IGN):
        before = signal.signal(signal.SIGTERM, handler)
        try:
            with contextlib.closing(nvme.Disk(tmp_path)), contextlib.closing(nvme.Disk(tmp_path)):
                same = signal.getsignal(signal.SIGTERM) == handler
                assert same == (handler != signal.SIG_DFL)
            assert signal.getsignal(signal.SIGTERM) == handler
        finally:
            signal.signal(signal.SIGTERM, before)


def test_sigterm_in_a_forked_child_of_a_run_ends_only_the_child(tmp_path):
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with contextlib.closing(nvme.Disk(tmp_path)) as disk:
            pid = os.fork()
            if pid == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(99)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
            assert os.path.isdir(disk.path)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_and_an_exception_in_training_leave_no_folder(tmp_path):
    """A whole program, from its start to its end by itself."""
    code = """if True:
        import os, sys, threading, time, torch, torch.distributed as dist
        from offload import Offload
        from stage2 import ZeroStage2
        store = dist.FileStore(sys.argv[1] + "/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        model = torch.nn.Linear(300, 300)
        zero = ZeroStage2(model, offload_optimizer=Offload("nvme", sys.argv[1] + "/disk"))
        for step in range(1_000_000):
            if step == 20:
                assert os.listdir(sys.argv[1] + "/disk")
                if sys.argv[2] == "exception":
                    raise ArithmeticError("boom on purpose")
                threading.Timer(0.05, os.kill, (os.getpid(), 15)).start()
            zero.backward(model(torch.ones(1, 300)).sum())
            zero.step()
    """
    for how, wanted in (("exception", 1), ("SIGTERM", -signal.SIGTERM)):
        (tmp_path / how).mkdir()
        command = [sys.executable, "-c", code, str(tmp_path / how), how]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert run.returncode == wanted, run.stderr
        assert ("boom on purpose" in run.stderr) == (how == "exception"), run.stderr
        assert os.listdir(tmp_path / how / "disk") == []


# --- a notebook's interrupt ---


def interrupt_later(seconds):
    """Ctrl-C for this process, as a notebook's interrupt is, after so many seconds."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


@contextlib.contextmanager
def python_handles_ctrl_c():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("stage", "home", "weights"), EVERYWHERE)
def test_interrupts_at_any_moment_and_going_on_change_no_bit(stage, home, weights, tmp_path):
    """Each rank is interrupted again and again, both at once or one alone, and goes on as one does
    in a notebook: zero_grad(), and the loop once more."""
    steps, interrupts = times(12, 120), times(4, 200)

    def work(rank, world):
        zero, model = make(stage, tmp_path, home=home, weights=weights)
        dice, same, caught = random.Random(rank), random.Random(7), 0
        with python_handles_ctrl_c():
            for round_ in itertools.count():
                alone, pause = same.random() < 0.3, same.random() * 0.02
                timer = None
                if round_ < interrupts and (not alone or rank == round_ % world):
                    timer = interrupt_later(pause + dice.random() * 0.003)
                try:
                    while zero.global_steps < steps:
                        backward(zero, model, rank, zero.global_steps)
                        zero.step()
                    if timer is not None:
                        timer.join()
                        time.sleep(0.001)
                    break
                except (KeyboardInterrupt, RanksDisagree) as error:
                    caught += isinstance(error, KeyboardInterrupt)
                    with contextlib.suppress(KeyboardInterrupt):
                        if timer is not None:
                            timer.join()
                    zero.zero_grad()
                except BaseException as error:
                    raise AssertionError(repr(error)) from error
            zero.close()
        return caught, values(model)

    def plain(rank, world):
        return trained(stage, tmp_path, rank, steps, home=home, weights=weights)

    wanted = run_ranks(plain, 2)[0]
    results = run_ranks(work, 2, timeout=times(30, 300), group_limit=LIMIT)
    for _, found in results:
        assert_same(found, wanted, "after interrupts")
    assert sum(caught for caught, _ in results) > 0
    say(f"interrupt: stage {stage}, state {home}, weights {weights}: "
        f"{[caught for caught, _ in results]} on the two ranks, same bits")  # fmt: skip


@pytest.mark.parametrize(("stage", "home", "weights"), EVERYWHERE)
def test_an_interrupt_and_then_close_leaves_a_whole_model(stage, home, weights, tmp_path):
    """All ranks are interrupted somewhere in a step, as by a notebook's button, and close."""

    def work(rank, world, seed):
        zero, model = make(stage, tmp_path, home=home, weights=weights)
        train(zero, model, rank, 1)
        dist.barrier()
        dice = random.Random(seed)
        with python_handles_ctrl_c():
            interrupt_later(dice.random() * 0.02)
            error = raised_by(lambda: train(zero, model, rank, 10_000, first=1))
        assert isinstance(error, (KeyboardInterrupt, RanksDisagree)), repr(error)
        del error
        zero.close()
        assert not settled() and type(model.a.weight) is torch.nn.Parameter
        return values(model)

    for seed in range(times(1, 50)):
        assert_same_everywhere(run_ranks(work, 2, seed, timeout=3 * LIMIT, group_limit=LIMIT))
    assert home != "nvme" or os.listdir(tmp_path) == []
    say(f"interrupt and close: stage {stage}, state {home}, weights {weights}: {seed + 1} times")


def test_ctrl_c_waits_for_the_end_of_a_step_and_a_second_one_does_not():
    with python_handles_ctrl_c():
        done = []
        with pytest.raises(KeyboardInterrupt), offload.uninterrupted():
            with offload.uninterrupted():
                os.kill(os.getpid(), signal.SIGINT)
                done.append("inner")
            done.append("outer")
        assert done == ["inner", "outer"]
        with pytest.raises(KeyboardInterrupt), offload.uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)
            done.append("never")
        assert done == ["inner", "outer"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# --- other habits of notebooks ---


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_constructing_twice_is_refused_and_the_first_goes_on(stage, tmp_path):
    def work(rank, world):
        plain = trained(stage, tmp_path, rank, 2)
        zero, model = make(stage, tmp_path)
        train(zero, model, rank, 1)
        for other in (1, 2, 3):
            error = raised_by(lambda: make(other, tmp_path, model=model))  # noqa: B023
            assert isinstance(error, ValueError) and "close() that one first" in str(error)
        del error
        train(zero, model, rank, 1, first=1)
        zero.close()
        assert_same(values(model), plain, "weights")
        make(stage, tmp_path, model=model)[0].close()  # closed, it may be managed again

    run_ranks(work, 2, group_limit=LIMIT)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deleting_it_without_close_frees_all_and_stage_3_says_what_is_lost(stage, tmp_path):
    def work(rank, world):
        zero, model = make(stage, tmp_path, weights="nvme" if stage == 3 else "none")
        train(zero, model, rank, 1)
        whole = zero.model_state_dict()
        del zero
        gc.collect()
        assert not settled()
        if stage == 3:
            assert "its optimizer is gone" in str(raised_by(lambda: model(rows(rank, 0))))
            error = raised_by(lambda: make(stage, tmp_path, model=model))
            assert isinstance(error, ValueError) and "make the model anew" in str(error)
            return
        assert_same(values(model), {n: whole[n] for n in values(model)}, "the model")
        zero, _ = make(stage, tmp_path, model=model)
        train(zero, model, rank, 1)
        zero.close()
        return

    run_ranks(work, 2, group_limit=LIMIT)
    assert os.listdir(tmp_path) == []


class Rows(torch.utils.data.Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return rows(self.rank, index)


def test_a_forked_data_loader_with_workers_disturbs_nothing(tmp_path):
    """Its workers are copies of a process that has files, hooks and a group."""

    def work(rank, world):
        plain = trained(3, tmp_path, rank, 6, weights="nvme")
        zero, model = make(3, tmp_path, weights="nvme")
        with warnings.catch_warnings():
            # Python 3.12 warns of threads in a parent that forks: Gloo has some.
            warnings.filterwarnings("ignore", ".*use of fork.*", DeprecationWarning)
            loader = torch.utils.data.DataLoader(
                Rows(rank), batch_size=None, num_workers=2, multiprocessing_context="fork"
            )
            for x in loader:
                zero.backward(model(x).square().mean())
                zero.step()
        del loader
        assert len(os.listdir(tmp_path)) >= 2
        zero.close()
        assert_same(values(model), plain, "weights")
        assert not settled()

    run_ranks(work, 2)
    assert os.listdir(tmp_path) == []


def test_a_failed_construction_in_a_loop_of_attempts_does_not_pile_up(tmp_path):
    """A cell is run again and again until its path is right."""
    (tmp_path / "file").write_text("x")

    def work(rank, world):
        model = Odd()
        for attempt in range(6):
            if attempt == 1:  # the last attempt's group of control goes with the next attempt
                before = len(os.listdir("/proc/self/fd"))
            error = raised_by(lambda: build(3, model, tmp_path / "file", home="nvme"))
            assert "is a folder" in str(error)
            del error
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= before and not settled()

    run_ranks(work, 2, group_limit=LIMIT)
