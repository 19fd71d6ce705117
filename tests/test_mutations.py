"""The quick part of mutations.py: today's source can still be broken in the ten ways that
notebooks/mistakes.py lists, and for each of them the test that is named there fails.

The program forks with the mistake planted in the modules, so it runs as a program of its own.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "notebooks"))

from mistakes import MISTAKES, planted, sources  # noqa: E402

PROGRAM = [sys.executable, str(ROOT / "tests/mutations.py")]


@pytest.fixture(scope="module")
def outcomes():
    """{mistake: (the test that failed, what it said)}."""
    done = subprocess.run([*PROGRAM, "--mistakes"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: (failed, said) for name, failed, said in lines}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught_by_the_test_that_is_named_for_it(outcomes, name):
    failed, said = outcomes[name]
    assert failed.split("[")[0] == MISTAKES[name].test, said


def test_there_are_ten_and_each_changes_its_files_and_nothing_on_disk():
    assert len(MISTAKES) == 10
    before = {path: path.read_bytes() for path in ROOT.glob("*.py")}
    for name, mistake in MISTAKES.items():
        texts = sources(name)
        assert {*texts} == {*mistake.files}
        for file, text in texts.items():
            assert text != (ROOT / file).read_text()
            compile(text, file, "exec")
        with planted(name):
            pass
    assert {path: path.read_bytes() for path in ROOT.glob("*.py")} == before


def test_a_text_that_is_not_there_exactly_once_is_refused(monkeypatch):
    wrong = MISTAKES["forget_the_mean"]
    for right, times in (("no such text", 0), ("self", 2)):
        monkeypatch.setitem(vars(wrong), "edits", ((right, "x"),))
        with pytest.raises(LookupError, match="the code changed, so mend") as caught:
            sources("forget_the_mean")
        assert (" 0 times" in str(caught.value)) == (times == 0)


def test_planted_modules_are_gone_afterwards():
    import stage2

    with planted("forget_the_mean"):
        import stage2 as broken

        source = broken.__loader__.get_source("stage2")
    assert broken is not stage2 and "take(index, 1, self" in source
    assert sys.modules["stage2"] is stage2


def test_every_fault_has_its_name_from_the_node_it_is_in():
    done = subprocess.run([*PROGRAM, "--list"], capture_output=True, text=True, timeout=60)
    names = [line.split(": ")[0] for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert len(names) == len({*names}) > 60
    assert [*MISTAKES] == names[:10]
