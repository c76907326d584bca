"""The examples with a framework, as somebody would run them first: unbroken, and interrupted twice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.world import ROOT, World

pytestmark = pytest.mark.long("several trainings by a framework")

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FSDP2 = [
    "-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port", "0", "--mixed_precision", "no",
    "--dynamo_backend", "no", "--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "SIZE_BASED_WRAP",
    "--fsdp_min_num_params", "1000",
]  # fmt: skip
PATIENTLY = ["-m", "tests.support.patiently"]


@pytest.mark.parametrize(
    ("script", "launcher", "epochs"),
    [
        pytest.param("with_accelerate.py", [], 5, marks=pytest.mark.sample),
        pytest.param("with_lightning.py", TORCHRUN, 3, marks=pytest.mark.nightly),
        pytest.param("with_accelerate.py", TORCHRUN, 10, marks=pytest.mark.nightly),
        pytest.param("with_accelerate.py", FSDP2, 10, marks=pytest.mark.nightly),
        ("huggingface.py", [], 3),
        pytest.param("huggingface.py", TORCHRUN, 3, marks=pytest.mark.nightly),
        ("with_lightning.py", [], 3),
    ],
)
def test_an_example_that_is_interrupted_has_the_unbroken_one_s_curve_and_model(
    script: str, launcher: list[str], epochs: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(name: str, *rigged: str) -> int:
        world.run = name
        options = ["--curve", world.root / name, "--final", world.root / f"{name}.safetensors", "--epochs", str(epochs)]
        if launcher and "lightning" in script:
            options += ["--devices", "2"]
        command: list[str | Path] = [sys.executable, *launcher, *PATIENTLY, ROOT / "examples" / script, *options]
        process = world.run_rigged("--every-s", "1000", "--every-steps", "7", *rigged, command=command)
        code = process.wait()
        assert code == 0 or "nothing is lost" in process.stderr, process.stderr
        return code

    if launcher is FSDP2:
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert start("unbroken") == 0
    assert start("broken", "--at", "Published:2:terminate") == 75
    killed = "kill-rank" if launcher else "kill-trainer"
    assert start("broken", "--back-off-s", "0.05", "--at", f"Published:1:{killed},Published:3:terminate") == 75
    assert start("broken") == 0

    unbroken, broken = ((world.root / name).read_text().splitlines() for name in ("unbroken", "broken"))
    assert set(broken) == set(unbroken)
    assert len(unbroken) > 20
    models = [(world.root / f"{name}.safetensors").read_bytes() for name in ("unbroken", "broken")]
    assert models[0] == models[1]


def test_the_example_that_saves_by_itself_has_the_unbroken_one_s_curve_and_model(world: World) -> None:
    def start(host: World, *rigged: str) -> int:
        files = ["--out", host.root / "out", "--curve", host.curve, "--final", host.final]
        command: list[str | Path] = [sys.executable, *PATIENTLY, ROOT / "examples/watch_torch_save.py", *files]
        if not rigged:
            return host.start(*command).wait()
        command += ["--await-commits", host.store / host.run / "commits"]
        process = host.run_rigged("--watch-look-s", "0.05", "--watch", str(host.root / "out"), *rigged, command=command)
        code = process.wait()
        assert code == 0 or "durable" in process.stderr, process.stderr
        return code

    assert start(world) == 0
    host = world.elsewhere()
    assert start(host, "--at", "Published:1:terminate") == 75
    again = world.elsewhere()
    assert start(again, "--back-off-s", "0.05", "--at", "Published:1:kill-trainer") == 0

    unbroken, broken = world.curve.read_text(), host.curve.read_text() + again.curve.read_text()
    assert set(broken.splitlines()) == set(unbroken.splitlines())
    assert again.final.read_bytes() == world.final.read_bytes()
