"""The course: every notebook runs top to bottom, its checks refuse the blank and take the solution.

The notebooks start threads and processes of their own, which a parent that forks must not have: so
this file runs itself as a program, which runs all of them on one pair of ranks and prints what came
of it, a line of JSON for each.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))

# (exercise, a pattern in the solution, what comes in its place, words of the verdict)
WRONG = [
    ("reduce_scatter", r"\.sum\(0\)", ".mean(0)", "That is the mean"),
    ("reduce_scatter", r"\.sum\(0\)", "[0]", "add up what all ranks sent"),
    ("reduce_scatter", r"view\(self\.world, -1\)\.sum\(0\)", "view(-1)", "A slice has numel / 2"),
    ("take", r"add_\((\S+), alpha=mean\)", r"copy_(\1 * mean)", "replaced the first"),
    ("take", r"alpha=mean", "alpha=1", "is added is not multiplied"),
    ("take", r"torch\.mul\((\S+), mean, out=piece\)", r"piece.copy_(\1)", "not averaged"),
    ("take", r"copy_\((\S+)\)\.mul_\(mean\)", r"copy_(\1 * mean)", "8 bits"),
    ("take", r"piece\.copy_\(", "piece.copy(", "in line"),
    ("take", r"def take", "def tale", "defines no function take"),
    ("take", r"else:", "else", "is no Python"),
    ("start_reduce", r"\.to\(self\.reduce_dtype\)", "", "half of FP32's bytes"),
    ("start_reduce", r"reduce_scatter\(full", "reduce_scatter(full * 2", "sums of the window are"),
    ("gather", r"bucket\.home\.read\(", "id(", "bucket.home.read has to copy"),
    ("gather", r"all_gather\(bucket\.flat\)", "all_gather(bucket.flat)()", "do not call it"),
    ("boundary", r"votes\[:, 1:\]", "votes[self.ranks.rank :][:1, 1:]", "another rank saw"),
    ("boundary", r"if yes", "", "no rank saw"),
    ("boundary", r"votes\[:, 0\]\.sum\(\)", "votes[self.ranks.rank, 0]", "the same on all ranks"),
    ("boundary", r"/ self\.loss_scale", "", "divide by the loss scale"),
    ("update", r"group\.step\(.*\)", "pass", "call group.step"),
    ("update", r"gradient\.mul_\(coefficient\)", "gradient", "not multiplied with"),
    ("update", r"mul_\(coefficient\)", "mul_(2 * coefficient)", "something else than lr"),
    ("update", r"self\._publish\(.*\)", "pass", "once per group"),
    ("update", r"(group\.step\(.*\))(\s+)(self\._publish\(.*\))", r"\3\2\1", "publish after it"),
    ("update", r", later=self\.may_fail", "", "Pass later=self.may_fail"),
    ("read_ahead", r"while waiting and free", "if waiting and free", "into every free one"),
    ("read_ahead", r"free\.pop\(\)", "free[-1]", "take it out of `free`"),
    ("read_ahead", r"waiting\.popleft\(\)", "waiting.pop()", "the first is needed first"),
    ("read_ahead", r"kinds\[group\]\)\)", "kinds[group][:1]))", "read all of them"),
    ("read_ahead", r"read and self", "self", "nothing is to be read"),
    ("read_ahead", r"kinds\[group\]\)\)", "kinds[group]) and None)", "has to wait for it"),
    (
        "read_ahead",
        r"(free\.pop\(\)[^#]*?\n +\))",
        r"\1; read and reading[-1][2].wait()",
        "wait for none",
    ),
    ("read_ahead", r"while waiting and free", "while waiting", "as long as there are both"),
    ("read_ahead", r"waiting\.popleft\(\), ", "waiting[0], ", "does not end"),
    ("forget_the_mean", r"1 / self\.ranks\.world", "1", "their sum would grow"),
    ("clip_by_the_local_norm", r"\.sum\(\)\)", ".max())", "squares of slices are summed"),
    ("padding_in_the_norm", r"\[-1\] :\]\.zero_", "[-1] :].abs_", "must count as zero"),
    ("count_steps_per_parameter", r"self\.optimizer\.step\(\)", "", "two steps, however"),
    ("overwrite_instead_of_add", r"add_\(reduced\)", "add_(reduced, alpha=2)", "sum, once"),
    ("reduce_twice", r"param\.grad = None", "param.grad.zero_()", "must not stay in p.grad"),
    ("stale_sums_for_an_idle_head", r"self\.tier\.drop\(\)", "pass", "nothing of the first"),
    ("read_before_the_write_ended", r"transfer\.after = .*", "", "bring the new bytes"),
    (
        "skip_a_collective_on_one_rank",
        r"weights\(self\._joint",
        "weights(set()",
        "new weights of both",
    ),
    ("boundary_flag_left_on", r"_next = None", "_next = False", "the counter rules again"),
    ("formulas", r'args\.dtype == "float32" and', "", "cannot be its own master"),
    ("formulas", r"home == weights !=", "home !=", "a master of its own"),
    ("formulas", r' != "nvme"', "", "On disk the master has"),
    ("formulas", r'"8\*P/N"', '"12*P/N"', "two moments are left"),
    ("formulas", r'"m\*4\*P"', '"4*P"', "on every backward: m times"),
    ("formulas", r'"4\*P", ""', '"m*4*P", ""', "once a window: no m"),
    ("formulas", r"2\*m\*", "m*", "again for each backward"),
    ("formulas", r"<= 2\*m", "2*m", "backward needs no weights"),
    ("formulas", r' if stage == 3 else ""', "", "once, after the step"),
    ("formulas", r'"0" if .* else "P\*e/N"', '"0"', "the fresh slice crosses"),
    ("formulas", r'"0" if .* else "P\*e/N"', '"P*e/N"', "nothing crosses after"),
    ("layout", r"-\(-(\S+) // ranks\.world\)", r"\1 // ranks.world", "round the slice up"),
    ("layout", r"-\(-(\S+) // ranks\.world\)", r"\1 // ranks.world + 1", "12 elements divide"),
    ("layout", r"= shard \* ranks\.world", "= self.offsets[-1]", "has to be padded"),
    ("layout", r"max\(1,", "max(0,", "at least one element"),
    ("layout", r"slice\(ranks\.rank \* shard,", "slice(ranks.rank,", "from r times"),
]


@pytest.fixture(scope="module")
def outcomes():
    """{what: "" or what is wrong with it}."""
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__], capture_output=True, text=True, timeout=900
    )
    assert not done.stderr, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs_and_its_checks_hold(outcomes, name):
    assert outcomes[name] == ""


def test_blanks_and_solutions_are_those_of_todays_code(outcomes):
    assert outcomes["cuts"] == ""


@pytest.mark.parametrize("wrong", WRONG, ids=[f"{w[0]}-{w[3]}" for w in WRONG])
def test_a_check_says_what_is_wrong(outcomes, wrong):
    name, old, _, words = wrong
    said = outcomes[" ".join(wrong)]
    assert said is not None, f"the solution of {name} has no {old!r} any more: mend WRONG"
    assert words in said


# ---- the program ---------------------------------------------------------------------------------


def main():
    sys.path[:0] = [str(ROOT / "notebooks"), str(ROOT)]
    import build
    import course
    import nbformat
    from exercises import EXERCISES, cut, verdict

    def report(what, problem):
        print(json.dumps([what, problem]), flush=True)

    stale = []
    with build.Shared():
        for path in build.notebooks():
            problem, nb = "", nbformat.read(path, as_version=4)
            try:
                if build.refresh(nb, path.name):
                    stale.append(path.name)
                build.run(nb, path.name)
            except (build.Broken, LookupError) as error:
                problem = str(error)
            report(path.stem, problem)
        try:
            for name, text in build.solutions().items():
                if (ROOT / "notebooks/solutions" / name).read_text() != text:
                    stale.append(f"solutions/{name}")
            report("cuts", f"of older code: {stale}; run `make notebooks`" if stale else "")
        except LookupError as error:
            report("cuts", str(error))
        ranks = course.start(2)
        for wrong in WRONG:
            name, pattern, new, _ = wrong
            try:
                answer, found = re.subn(pattern, new, cut(EXERCISES[name])[0], count=1)
            except LookupError:
                found = 0
            said = verdict(ranks, EXERCISES[name], answer) if found else None
            report(" ".join(wrong), said)
        ranks.stop()


if __name__ == "__main__":
    main()
