"""The harness itself: what it reports when ranks fail, and that nothing of them stays behind."""

import logging
import os
import signal
import sys
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from ranks import RankError, all_raise, alone, assert_same_everywhere, run_ranks


def all_reduced(value):
    tensor = torch.tensor([float(value)])
    dist.all_reduce(tensor)
    return tensor.item()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_come_in_rank_order(world):
    captured = {"offset": 10}  # a closure: nothing has to be importable

    def work(rank, world, factor, *, power):
        time.sleep(0.02 * (world - rank))  # the last rank ends first
        return captured["offset"] + (factor * rank) ** power, all_reduced(1), dist.get_world_size()

    wanted = [(10 + (3 * rank) ** 2, float(world), world) for rank in range(world)]
    assert run_ranks(work, world, 3, power=2) == wanted


def test_ranks_are_processes_with_one_thread_and_their_own_seed():
    def work(rank, world):
        return os.getpid(), torch.get_num_threads(), torch.rand(4)

    (pid0, threads0, random0), (pid1, threads1, random1) = run_ranks(work, 2)
    assert len({pid0, pid1, os.getpid()}) == 3
    assert threads0 == threads1 == 1
    assert not torch.equal(random0, random1)


def test_large_results_and_backward():
    def work(rank, world):
        weight = torch.ones(2_000_000, requires_grad=True)
        (weight * (rank + 1)).sum().backward()
        return {"grad": weight.grad, "bf16": torch.zeros(3, dtype=torch.bfloat16)}

    for rank, result in enumerate(run_ranks(work, 2)):
        assert result["grad"].unique().tolist() == [rank + 1]
        assert result["bf16"].dtype == torch.bfloat16


def test_an_exception_is_reported_first_and_with_its_traceback():
    def deep_inside(rank):
        if rank == 1:
            raise ValueError("boom on purpose")

    def work(rank, world):
        deep_inside(rank)
        return all_reduced(1)  # the other ranks wait here until rank 1's connections close

    start = time.monotonic()
    with pytest.raises(RankError, match="2 of 2 ranks failed") as caught:
        run_ranks(work, 2)
    assert time.monotonic() - start < 10
    errors = caught.value.errors
    assert list(errors) == [1, 0]
    assert errors[1][:2] == ("ValueError", "boom on purpose")
    assert "deep_inside" in errors[1][2]
    assert "ValueError: boom on purpose" in str(caught.value)


def test_a_hang_is_reported_with_stacks_and_killed(tmp_path):
    def stuck_here(rank):
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        if rank == 0:
            all_reduced(1)  # in C++, waiting for the other rank
        time.sleep(100)

    with pytest.raises(RankError) as caught:
        run_ranks(lambda rank, world: stuck_here(rank), 2, timeout=1)
    for rank in (0, 1):
        kind, message, stacks = caught.value.errors[rank]
        assert (kind, message) == ("Hang", "still running after 1 s")
        assert "stuck_here" in stacks
    assert "all_reduce" in caught.value.errors[0][2]
    assert_gone(tmp_path, 2)


def test_an_interrupt_leaves_no_rank_behind(tmp_path):
    def work(rank, world):
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        time.sleep(100)

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.7)
        with pytest.raises(KeyboardInterrupt):
            run_ranks(work, 2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert_gone(tmp_path, 2)


def assert_gone(folder, world):
    pids = [int((folder / str(rank)).read_text()) for rank in range(world)]
    for pid in pids:
        with pytest.raises(ProcessLookupError):  # a zombie would still take the signal
            os.kill(pid, 0)


def test_a_dead_rank_is_reported_or_expected():
    def work(rank, world):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return rank

    with pytest.raises(RankError) as caught:
        run_ranks(work, 2)
    assert caught.value.errors == {1: ("Died", "killed by SIGKILL", "")}
    assert run_ranks(work, 2, expect_exit={1: -signal.SIGKILL}) == [0, None]
    with pytest.raises(RankError, match="was to end with exit code 3"):
        run_ranks(work, 2, expect_exit={0: 3, 1: -signal.SIGKILL})


def test_a_result_that_cannot_travel_is_an_error():
    with pytest.raises(RankError) as caught:
        alone(lambda rank, world: lambda: None)
    assert "pickle" in caught.value.errors[0][1].lower()


def test_warnings_and_strays_fail_a_rank():
    def warn(rank, world):
        warnings.warn("careful", UserWarning, stacklevel=1)

    def lose_a_thread(rank, world):
        thread = threading.Thread(target=lambda: 1 // 0)
        thread.start()
        thread.join()

    with pytest.raises(RankError, match="UserWarning: careful"):
        alone(warn)
    with pytest.raises(RankError, match="in a thread or a finalizer: ZeroDivisionError"):
        alone(lose_a_thread)


def test_output_of_ranks_reaches_pytest(capsys):
    def work(rank, world):
        print("from python", flush=False)
        logging.getLogger("zero").warning("from the log")
        os.system("echo from a child")
        print("to stderr", file=sys.stderr)

    alone(work)
    lines = capsys.readouterr().out.splitlines()
    texts = ("from python", "from the log", "from a child", "to stderr")
    assert lines == [f"[rank 0] {text}" for text in texts]


def test_all_raise():
    def divide(rank, world):
        raise ZeroDivisionError(f"rank {rank} divides")

    assert all_raise(divide, 2, ArithmeticError, "divides") == ["rank 0 divides", "rank 1 divides"]


@pytest.mark.parametrize(
    ("who", "message"),
    [
        (lambda rank: rank == 0, "rank 1: Failed: DID NOT RAISE"),
        (lambda rank: 1 // 0, "rank 1: ZeroDivisionError"),
        (lambda rank: time.sleep(9 * rank) or True, "rank 1: Hang"),
    ],
    ids=["silent", "other error", "late"],
)
def test_all_raise_wants_the_error_everywhere(who, message):
    def work(rank, world):
        if rank == 0 or who(rank):
            raise ValueError("wanted")

    with pytest.raises(AssertionError, match=message):
        all_raise(work, 2, ValueError, "wanted", within=0.5, timeout=1)


def test_all_raise_is_not_satisfied_by_a_peer_that_left():
    """Rank 1 must fail by itself: here it waits for a collective that rank 0 never joins."""

    def work(rank, world):
        if rank == 0:
            raise RuntimeError("rank 0 gave up")
        all_reduced(1)

    with pytest.raises(RankError) as caught:
        all_raise(work, 2, RuntimeError, "", within=0.5, timeout=1.5, group_limit=30)
    assert 1 in caught.value.errors


def test_same_everywhere():
    nan = float("nan")

    def make():
        return {"w": [torch.tensor([1.0, nan])], "n": (3, nan), "scalar": torch.tensor(2)}

    assert assert_same_everywhere([make(), make(), make()])["n"][0] == 3

    other = make()
    other["w"][0][0] = 1.5
    with pytest.raises(
        AssertionError, match=r"rank 2 .*\['w'\]\[0\]: 1 of 2 .* index 0: 1.0 and 1.5"
    ):
        assert_same_everywhere([make(), make(), other])
    for left, right in [([1], [1, 2]), ({"a": 1}, {"b": 1}), (1, 1.0), (0.5, 0.25)]:
        with pytest.raises(AssertionError, match="rank 0 and rank 1 differ"):
            assert_same_everywhere([left, right])
    with pytest.raises(AssertionError, match=r"0\.0 and -0\.0"):
        assert_same_everywhere([torch.tensor(0.0), torch.tensor(-0.0)])
    with pytest.raises(AssertionError, match=r"float32 \(2,\) and torch.float64"):
        assert_same_everywhere([torch.zeros(2), torch.zeros(2, dtype=torch.float64)])
