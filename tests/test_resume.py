"""Runs of a stage file that end too early, by a real SIGKILL, and go on from the file they left.

The model is a small one, so that the kills are many and the seconds few.
"""

import functools
import os
import random
import signal
import tempfile
import time

import pytest
import torch

from models import STAGES
from notebooks import demo
from ranks import RankError, _fork, assert_same_everywhere, run_ranks

KILLED = "killed by SIGKILL"
STEPS = 6


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Ranks are forked, so they have what is set here."""
    smaller = functools.partial(demo.Transformer, width=16, heads=2, layers=1)
    monkeypatch.setattr(demo, "Transformer", smaller)
    monkeypatch.setattr(demo, "batch", functools.partial(demo.batch, rows=2, length=16))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a killed run leaves its folders
    demo.read_text()  # read once, not on each rank of each run


def arguments(stage, *options, **paths):
    line = ["--steps", str(STEPS), "--micro-batches", "2", "--device", "cpu", *options]
    line += [part for option, path in paths.items() for part in (f"--{option}", str(path))]
    return demo.arguments(stage, line)


def run(args, world=2):
    """What a run reports, and what rank 0 says."""

    def work(rank, world):
        said = []
        result, _ = demo.run(STAGES[args.stage], args, said.append)
        return (result, said) if rank == 0 else (result["losses"], None)

    (result, said), *others = run_ranks(work, world)
    assert all(losses == result["losses"] for losses, _ in others)
    return result, said


def numbers(result):
    """What two runs of one configuration have in common, if they do the same steps."""
    return {k: v for k, v in result.items() if k not in ("config", "seconds")}


# ---- runs that end by themselves -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (1, ("--mode", "managed")),
        (2, ("--offload", "cpu", "--dtype", "bfloat16")),
        (3, ("--offload", "nvme", "--offload-param", "nvme", "--mode", "unmanaged")),
    ],
)
def test_a_resumed_run_is_the_same_to_the_last_bit(stage, options, tmp_path):
    """Its losses are those on the same data, and what it reports of a step is the same."""
    file = tmp_path / "run.pt"
    whole, _ = run(arguments(stage, *options))
    half = run(arguments(stage, *options, "--steps", "3", save=file))[0]
    resumed, said = run(arguments(stage, *options, "--save-every", "1", resume=file, save=file))
    assert said[0] == f"going on after step 3 of {file}"
    assert half["losses"] == whole["losses"][:3] and len(whole["losses"]) == STEPS
    assert_same_everywhere([numbers(whole), numbers(resumed)])


def test_a_finished_run_has_nothing_left_to_do_and_moves_to_any_stage_and_ranks(tmp_path):
    file = tmp_path / "run.pt"
    saved, _ = run(arguments(2, save=file))
    for stage, world, *options in ((3, 3, "--offload", "nvme"), (1, 1), (2, 2)):
        loaded, _ = run(arguments(stage, *options, resume=file), world)
        assert loaded["fingerprint"] == saved["fingerprint"]
        assert loaded["losses"] == saved["losses"] and loaded["seconds"] == 0
    further, _ = run(arguments(3, "--steps", "7", resume=file), 3)
    assert further["losses"][:STEPS] == saved["losses"] and len(further["losses"]) == 7
    assert further["fingerprint"] != saved["fingerprint"]


def test_the_other_half_of_the_data_comes_after_a_resume(tmp_path):
    """Batches are counted, so other micro-batches per step do not repeat or skip any."""
    drawn, draw = [], demo.batch

    def work(rank, world):
        demo.batch = lambda *args: drawn.append(draw(*args)[0]) or (drawn[-1], drawn[-1])
        file = tmp_path / "run.pt"
        demo.run(STAGES[1], arguments(1, "--steps", "3", save=file), print)
        first = drawn.copy()
        drawn.clear()
        demo.run(
            STAGES[1], arguments(1, "--steps", "5", "--micro-batches", "3", resume=file), print
        )
        assert len(first) == 6 and len(drawn) == 12
        assert_same_everywhere([first, drawn[:6]])
        assert not torch.equal(drawn[6], drawn[0])
        return drawn

    one, other = run_ranks(work, 2)
    assert not torch.equal(one[0], other[0]), "each rank has its own data"


def test_without_a_file_it_says_so_and_starts_at_the_beginning(tmp_path):
    plain, _ = run(arguments(1))
    resumed, said = run(arguments(1, resume=tmp_path / "none.pt"))
    assert said[0] == f"no {tmp_path / 'none.pt'} yet: starting at step 1"
    assert_same_everywhere([numbers(plain), numbers(resumed)])


def test_it_saves_every_so_many_steps_and_at_the_end(tmp_path):
    def work(rank, world):
        saved, save = [], demo.save
        demo.save = lambda zero, path, losses, drawn: (
            saved.append((len(losses), drawn)), save(zero, path, losses, drawn)
        )  # fmt: skip
        demo.run(STAGES[1], arguments(1, "--save-every", "4", save=tmp_path / "a.pt"), print)
        return saved

    assert assert_same_everywhere(run_ranks(work, 2)) == [(4, 8), (6, 12)]
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"], "nothing is left beside it"


def test_steps_between_saves_start_at_one(capsys):
    with pytest.raises(SystemExit) as stop:
        arguments(1, "--save-every", "0")
    assert stop.value.code == 2 and "--save-every" in capsys.readouterr().err


# ---- runs that are killed ------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["while writing", "before the new name"])
def test_a_kill_while_saving_leaves_the_old_file(moment, tmp_path):
    file = tmp_path / "run.pt"
    whole, _ = run(arguments(1, save=file), world=1)
    run(arguments(1, "--steps", "3", save=file), world=1)
    before = file.read_bytes()

    def work(rank, world):
        if moment == "while writing":
            torch.save = lambda state, target: (write_half(target), die())
        else:
            os.replace = lambda *paths: die()
        demo.run(STAGES[1], arguments(1, "--save-every", "1", save=file, resume=file), print)

    def write_half(target):
        with open(target, "wb") if isinstance(target, (str, os.PathLike)) else target as out:
            out.write(before[: len(before) // 2])

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    run_ranks(work, 1, expect_exit={0: -signal.SIGKILL})
    assert file.read_bytes() == before, "the old file is whole"
    resumed, said = run(arguments(1, save=file, resume=file), world=1)
    assert said[0].startswith("going on after step 3")
    assert resumed["fingerprint"] == whole["fingerprint"]
    assert [path.name for path in tmp_path.iterdir() if path.suffix] == ["run.pt"]


def kill(*pids):
    """All at the same moment: stopped processes do not see each other's connections close."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)


def run_until_killed(args, world, step, delay):
    """Kills all ranks `delay` seconds after the end of the step; what came of them before."""
    pids, now = _fork.SimpleQueue(), _fork.Event()

    def killer():
        ranks = [pids.get() for _ in range(world)]
        now.wait()
        time.sleep(delay)
        kill(*ranks)

    def say(text):
        if text.startswith(f"step {step:4} "):
            now.set()

    def work(rank, world):
        pids.put(os.getpid())
        demo.run(STAGES[args.stage], args, say if rank == 0 else lambda text: None)
        time.sleep(60)  # it comes, if not while training, then after

    other = _fork.Process(target=killer)
    other.start()
    try:
        run_ranks(work, world)
        raise AssertionError("nobody was killed")
    except RankError as failure:
        assert [error[:2] for error in failure.errors.values()] == [("Died", KILLED)] * world
    finally:
        other.kill()
        other.join()


@pytest.mark.parametrize(
    ("stage", "options", "kills"),
    [
        (1, ("--mode", "unmanaged"), 2),
        (2, ("--offload", "cpu", "--dtype", "bfloat16"), 2),
        (3, ("--offload", "nvme", "--offload-param", "nvme"), 3),
    ],
)
def test_killed_and_resumed_it_ends_as_if_it_never_was(stage, options, kills, tmp_path):
    """At random moments; each run goes on from where the last save was."""
    disk, file, draw = tmp_path / "disk", tmp_path / "run.pt", random.Random(stage)
    options = *options, "--nvme-path", str(disk), "--save-every", "1"
    whole, _ = run(arguments(stage, *options, save=file))
    file.unlink()
    args, step = arguments(stage, *options, save=file, resume=file), 0
    for _ in range(kills):
        step = draw.randint(step + 1, min(step + 2, STEPS))
        run_until_killed(args, 2, step, draw.uniform(0, 2 * whole["seconds"]))
        saved = len(torch.load(file, weights_only=True)["losses"]) if file.exists() else 0
        assert saved >= step - 1, "the save after a step is the next thing that is done"
        step = max(step, saved)
        if saved == STEPS:
            break
    resumed, _ = run(args)
    assert resumed["fingerprint"] == whole["fingerprint"] and resumed["losses"] == whole["losses"]
    assert not disk.exists() or not list(disk.iterdir()), "files of the killed runs stay behind"
