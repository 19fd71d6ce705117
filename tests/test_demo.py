"""The stage files as programs, the numbers they report, and how `compare.py` judges them."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from notebooks import compare, demo
from ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
SHORT = ["--steps", "2", "--micro-batches", "2", "--device", "cpu"]
# compare.py as a program that judges the results in files instead of its own
JUDGE = """
import json, sys
from pathlib import Path
from notebooks import compare
for name in sys.argv[1:]:
    compare.run_all = lambda options, say: json.loads(Path(f"{name}.json").read_text())
    print("exit status", compare.main(["--out", name]), flush=True)
sys.exit(compare.main(["--out", name]))
"""


def start(*command):
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def row(measured, formula=""):
    return {"formula": formula, "value": measured if formula else None, "measured": measured}


def made_up():
    """What compare.run_all gives, made up: DDP, and two stages in all modes on two tiers."""
    base = {"values": {"P": 100, "N": 2, "e": 4, "m": 2}, "losses": [5.0, 4.0], "seconds": 0.1}
    base |= {"fingerprint": "ddp" * 9, "from_ddp": 0.0, "loss_from_ddp": 0.0}
    base |= {"memory": {"device params": row(400.0, "P*e")}}
    base |= {"traffic": {"all_reduce": row(400.0, "2*P*e*(N-1)/N")}}
    config = {"stage": 0, "mode": "", "offload": "none", "offload_param": "none", "device": "cpu"}
    results = [{**base, "config": config}]
    for args in compare.configurations(compare.parse([])):
        if args.stage < 3:
            one = copy.deepcopy({**base, "config": vars(args)})
            one["fingerprint"] = "ddp" * 9 if args.stage == 1 else "other" * 9
            one["from_ddp"] = 0.0 if args.stage == 1 else 1e-7
            one["memory"]["nvme optimizer"] = {**row(1200.0, "12*P"), "measured": 1210.0}  # blocks
            results.append(one)
    return results


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """All programs of this file at once: most of their time is the import of torch."""
    folder = tmp_path_factory.mktemp("demo")
    good, bad = made_up(), made_up()
    bad[3]["fingerprint"] = "wrong" * 9
    started = {}
    for stage, mode in ((1, "managed"), (2, "unmanaged")):
        name = f"stage{stage}"
        line = [f"{name}.py", *SHORT, "--mode", mode, "--json", f"{folder}/{name}.json"]
        started[name] = start("-W", "error", *line)
    line = [*SHORT, "--mode", "unmanaged", "--offload", "nvme", "--offload-param", "nvme"]
    line += ["--nvme-path", f"{folder}/disk", "--json", f"{folder}/two.json"]
    started["two"] = start(*TORCHRUN, "--nproc-per-node", "2", "stage3.py", *line)
    for name, results in (("good", good), ("bad", bad)):
        (folder / f"{name}.json").write_text(json.dumps(results))
    started["judge"] = start("-c", JUDGE, f"{folder}/good", f"{folder}/bad")
    yield folder, started
    for process in started.values():
        process.kill()
        process.communicate()


def output(programs, name, status=0):
    text, _ = programs[1][name].communicate(timeout=120)
    assert programs[1][name].returncode == status, text
    return text


def test_a_stage_runs_alone_and_one_rank_has_nothing_to_divide(programs):
    def work(rank, world):
        args = demo.arguments(3, [*SHORT, "--offload", "cpu"])
        return demo.run(compare.STAGES[3], args, lambda text: None)[0]["fingerprint"]

    prints = set(run_ranks(work, 1))
    for name in ("stage1", "stage2"):
        text = output(programs, name)
        numbers = json.loads((programs[0] / f"{name}.json").read_text())
        assert text.splitlines()[-1] == f"fingerprint: {numbers['fingerprint']}"
        assert numbers["config"]["stage"] == int(name[-1])
        assert numbers["values"]["N"] == 1 and numbers["values"]["m"] == 2
        assert len(numbers["losses"]) == 2 and numbers["losses"][1] < numbers["losses"][0] < 6
        for found in numbers["memory"].values():
            assert found["measured"] == found["value"] > 0
        assert numbers["seconds"] > 0 and not numbers["skipped"]
        prints.add(numbers["fingerprint"])
    assert len(prints) == 1


def test_two_ranks_under_torchrun_equal_forked_ranks_in_the_other_mode(programs):
    def work(rank, world):
        args = demo.arguments(3, [*SHORT, "--mode", "managed"])
        numbers, params = demo.run(compare.STAGES[3], args, lambda text: None)
        assert bool(params) == (rank == 0)
        return numbers["losses"], numbers["fingerprint"] if rank == 0 else None

    (losses, fingerprint), (others, _) = run_ranks(work, 2)
    text = output(programs, "two")
    numbers = json.loads((programs[0] / "two.json").read_text())
    assert numbers["fingerprint"] == fingerprint
    assert numbers["losses"] == losses == others
    assert text.count("fingerprint: ") == 1, "only rank 0 talks"
    assert "nvme_read" in text and "step    2 of 2" in text
    for kind, found in {**numbers["memory"], **numbers["traffic"]}.items():
        assert kind == "control" or compare.as_formula(kind, found), (kind, found)
    assert not list((programs[0] / "disk").iterdir()), "files stay behind"


@pytest.mark.parametrize("stage", [1, 2])
def test_parameter_offload_is_refused_but_in_stage_3(stage, capsys):
    with pytest.raises(SystemExit) as stop:
        demo.arguments(stage, ["--offload-param", "cpu"])
    assert stop.value.code == 2
    assert "--offload-param needs stage 3" in capsys.readouterr().err
    assert demo.arguments(3, ["--offload-param", "cpu"]).offload_param == "cpu"


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        demo.arguments(2, ["--help"])
    text = capsys.readouterr().out
    for name in vars(demo.arguments(2, [])).keys() - {"stage"}:
        assert f"--{name.replace('_', '-')}" in text


def test_formulas():
    args = demo.arguments(2, ["--offload", "nvme", "--dtype", "bfloat16", "--device", "cpu"])
    memory, traffic = demo.formulas(args)
    values = {"P": 100, "N": 4, "e": 2, "m": 3}
    rows = demo.compare({**memory, **traffic}, {"control": 7, "broadcast": 0}, values)
    assert {name: found["value"] for name, found in rows.items()} == {
        "device params": 200,
        "nvme optimizer": 300,
        "reduce_scatter": 900,
        "all_gather": 150,
        "device_to_host": 300,
        "host_to_device": 50,
        "nvme_read": 300,
        "nvme_write": 300,
        "control": None,
    }


def test_a_fingerprint_is_of_bits_and_in_name_order():
    params = {"b": torch.ones(3), "a": torch.zeros(2, 2)}
    before = demo.fingerprint(params)
    assert before == demo.fingerprint({"a": torch.zeros(2, 2), "b": torch.ones(3)})
    assert before != demo.fingerprint({"a": torch.zeros(2, 2), "b": torch.ones(3) + 1e-7})
    assert before != demo.fingerprint({"a": -torch.zeros(2, 2), "b": torch.ones(3)})


def test_a_batch_is_text_and_what_follows():
    text = demo.read_text()
    assert len(text) == 2_000_000 and b"import" in bytes(text[:100_000].tolist())
    x, y = demo.batch(text, torch.Generator().manual_seed(1), rows=3, length=9)
    assert x.shape == y.shape == (3, 9) and torch.equal(x[:, 1:], y[:, :-1])
    again, _ = demo.batch(text, torch.Generator().manual_seed(1), rows=3, length=9)
    other, _ = demo.batch(text, torch.Generator().manual_seed(2), rows=3, length=9)
    assert torch.equal(x, again) and not torch.equal(x, other)


def test_compare_runs_and_judges_what_it_ran():
    def work(rank, world):
        options = compare.parse(["--quick"])
        chosen = {(1, "none", "none"), (3, "nvme", "nvme")}
        every = list(compare.configurations(options))
        assert len(every) == 22
        some = [a for a in every if (a.stage, a.offload, a.offload_param) in chosen]
        compare.configurations = lambda options: some
        lines = []
        results = compare.run_all(options, lines.append)
        assert len(lines) == len(results) == 1 + len(some) == 5
        return results if rank == 0 else []

    results = run_ranks(work, 2)[0]
    assert compare.broken_promises(results) == []
    assert compare.verdict(results, []).startswith("OK: 4 configurations; managed = unmanaged")
    assert len(compare.table(results).splitlines()) == 2 + len(results)


def test_compare_exits_with_1_if_a_promise_is_broken(programs):
    good, bad = output(programs, "judge", status=1).split("exit status ")[:2]
    assert good.splitlines()[-1].startswith(
        "OK: 12 configurations; managed = unmanaged bitwise in 6"
    )
    assert bad.startswith("0\n"), "the exit status of what is good"
    assert bad.splitlines()[-1].startswith("BROKEN (3 promises): 12 configurations")
    assert "bitwise in 5 of 6" in bad.splitlines()[-1]
    assert "stage 1, cpu: managed and unmanaged differ" in bad
    assert (programs[0] / "good" / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((programs[0] / "good" / "compare.json").read_text())["broken"] == []


@pytest.mark.parametrize(
    ("part", "name", "value", "complaint"),
    [
        ("from_ddp", None, 1e-3, "from_ddp is 1.0e-03"),
        ("from_ddp", None, float("nan"), "from_ddp is nan"),
        ("loss_from_ddp", None, 1e-3, "loss_from_ddp is 1.0e-03"),
        (
            "memory",
            "device params",
            {**row(400, "P*e"), "measured": 404},
            "params is 404 bytes, not",
        ),
        (
            "memory",
            "nvme optimizer",
            {**row(100, "P"), "measured": 103},
            "optimizer is 103 bytes, not",
        ),
        ("memory", "host grads", row(8), "host grads is 8 bytes, not none"),
        ("traffic", "broadcast", row(8), "broadcast is 8 bytes, not none"),
        ("traffic", "all_gather", {**row(100, "<= P"), "measured": 101}, "101 bytes, not <= P"),
        ("traffic", "all_gather", {**row(100, "<= P"), "measured": 49}, "49 bytes, not <= P"),
    ],
)
def test_one_wrong_number_is_one_broken_promise(part, name, value, complaint):
    results = made_up()
    assert compare.broken_promises(results) == []
    if name is None:
        results[-1][part] = value
    else:
        results[-1][part][name] = value
    (line,) = compare.broken_promises(results)
    assert line.startswith("stage 2, nvme, unmanaged: ") and complaint in line


def test_both_modes_wrong_alike_is_seen_in_the_other_tiers_and_in_ddp():
    results = made_up()
    for result in results:
        if result["config"]["offload"] == "cpu":
            result["fingerprint"] += "!"
    wrong = {
        f"stage {n}, {mode}: tiers differ" for n in (1, 2) for mode in ("managed", "unmanaged")
    }
    wrong |= {
        f"stage 1, cpu, {mode}: not bitwise equal to DDP" for mode in ("managed", "unmanaged")
    }
    assert set(compare.broken_promises(results)) == wrong
