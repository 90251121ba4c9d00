"""The example scripts for other people's frameworks, run, and compared with plain loops.

Those whose package is not there are skipped, but in CI: ./dev setup --frameworks installs them.
"""

import contextlib
import gc
import importlib
import importlib.util
import io
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import dmuond.torch
import needs
import pytest
import torch
from daemons import free_port
from trainers import Ranks

EXAMPLES = Path(__file__).parents[2] / "client/python/examples"
PATIENCE_S = 240.0
OPTIONS = {"lr": 1e-2, "adamw_lr": 1e-3, "max_grad_norm": 1.0, "verbose": False}


def look_for_modules_in(folder: Path | str):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def example(name: str):
    """An example as a module."""
    look_for_modules_in(EXAMPLES)
    return importlib.import_module(name)


def as_script(rank: int, world: int, script: str, arguments: list[str], modules: list[str]) -> str:
    """What an example prints in a process that may have run others, whose imports are there."""
    for folder in (*modules, EXAMPLES):
        look_for_modules_in(folder)
    if world == 1:  # as nobody's launcher has started it
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
    if "accelerate" in sys.modules:  # it takes a process for what it was to its first script
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
    sys.argv = [script, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    gc.collect()
    return output.getvalue()


@pytest.fixture(scope="module")
def interpreters():
    with Ranks() as processes:
        yield processes


@pytest.fixture
def run(interpreters, address):
    """Runs an example, or another script, on one rank or several; the first one's lines.

    By their first words.
    """

    def run(
        script: str | Path, *arguments: str | Path, ranks: int = 1, modules=()
    ) -> dict[str, str]:
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WANDB_MODE": "offline",
        }
        told = str(script), list(map(str, arguments)), list(map(str, modules))
        first, *_ = interpreters.run(
            as_script, ranks, [address], *told, environment=environment, timeout_s=PATIENCE_S
        )
        return lines(first)

    return run


def lines(text: str) -> dict[str, str]:
    """Of each step, and of the weights in the end."""
    words = [line.split(" ") for line in text.splitlines()]
    return {" ".join(w[: 1 + (w[0] == "step")]): w for w in words if w[0] in ("step", "weights")}


def steps(found: dict[str, str]) -> list[int]:
    return [int(name.split()[1]) for name in found if name != "weights"]


def assert_goes_on(whole, part):
    """What the second half of a run has said is what the undisturbed one has."""
    assert part == {name: whole[name] for name in part}


@pytest.mark.parametrize("script", ["hf_trainer.py", "survivor.py"])
def test_an_example_without_arguments_prints_its_usage(script):
    if script.startswith("hf"):
        needs.package("transformers")
    command = [sys.executable, EXAMPLES / script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.startswith(f"usage: {script} ") and "Traceback" not in done.stderr


# --- Hugging Face's Trainer ---


def test_the_trainer_makes_the_optimizer_or_is_handed_it_and_resumes(run, tmp_path):
    needs.package("transformers")
    needs.package("accelerate")
    made = run("hf_trainer.py", tmp_path / "made", "8")
    assert steps(made) == list(range(1, 9))
    assert run("hf_trainer.py", tmp_path / "handed", "8", "--handed") == made
    for how in ("made", "handed"):
        shutil.copytree(tmp_path / how / "checkpoint-4", tmp_path / f"{how}-half/checkpoint-4")
        again = ["--handed"] if how == "handed" else []
        assert run("hf_trainer.py", tmp_path / f"{how}-half", "8", "--resume", *again) == made


TWO_TRAINERS = """
import sys, hf_trainer
all_stay = []
for step in ("closed", "left"):
    model = hf_trainer.make_model()
    for _ in range(2):
        trainer = hf_trainer.make_trainer(model, sys.argv[1], 2, handed=False)
        trainer.train()
        all_stay.append(trainer)
        if step == "closed":
            trainer.optimizer.optimizer.close()
    print("step", step, hf_trainer.digest(model), flush=True)
"""


def test_a_second_trainer_of_one_model_takes_the_place_of_the_first(run, tmp_path):
    needs.package("transformers")
    needs.package("accelerate")
    (tmp_path / "two_trainers.py").write_text(TWO_TRAINERS)
    found = run(tmp_path / "two_trainers.py", tmp_path)
    assert found["step closed"][2] == found["step left"][2]


# --- Accelerate ---


def plain_accumulation(rank, world, last):
    """What accelerate_loop.py does, without Accelerate."""
    tiny = example("tiny_model")
    model = tiny.make_model()
    optimizer = dmuond.torch.Muon(model, **OPTIONS)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    for step in range(1, last + 1):
        for part in range(2):
            tokens = tiny.batch(2 * step + part, rank)
            (tiny.loss_of(model(tokens), tokens) / 2).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    optimizer.close()
    return tiny.digest(model)


def test_accelerate_is_the_plain_loop_and_goes_on_from_save_state(run, ranks, address, tmp_path):
    needs.package("accelerate")
    whole = run("accelerate_loop.py", tmp_path / "whole", "1", "6")
    assert whole["weights"][1] == ranks.run(plain_accumulation, 1, [address], 6)[0]
    run("accelerate_loop.py", tmp_path / "half", "1", "3")
    again = run("accelerate_loop.py", tmp_path / "half", "4", "6")
    assert steps(again) == [4, 5, 6]
    assert_goes_on(whole, again)


def test_accelerates_ddp_on_two_ranks_is_the_plain_loop(run, ranks, address, tmp_path):
    needs.package("accelerate")
    two = run("accelerate_loop.py", tmp_path, "1", "3", ranks=2)
    assert {two["weights"][1]} == set(ranks.run(plain_accumulation, 2, [address], 3))


def seen_by_accelerate(make, scaler):
    """After each step: was it skipped, learning rate, norm. The second one has an infinity."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
    accelerated = AcceleratedOptimizer(optimizer, device_placement=False, scaler=scaler)
    stepped = AcceleratedScheduler(schedule, accelerated, split_batches=True)
    for step in range(4):
        loss = model(torch.ones(5, 8)).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if step == 1:
            model.weight.grad.fill_(float("inf"))
        accelerated.step()
        stepped.step()
        accelerated.zero_grad()
        outcome = getattr(optimizer, "last_outcome", None)
        norm = None if outcome is None else outcome.gradient_norm
        yield accelerated.step_was_skipped, schedule.get_last_lr()[0], norm
    if outcome is not None:
        optimizer.close()


def test_accelerate_knows_of_skipped_steps_and_its_schedules_stand_still(address):
    """As with torch's AdamW, which skips none without a scaler."""
    needs.package("accelerate")

    def make(model):
        return dmuond.torch.Muon(model, address=address, verbose=False)

    def make_torchs(model):
        return torch.optim.AdamW(model.parameters())

    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    want = list(seen_by_accelerate(make_torchs, scalers[0]))
    assert [skipped for skipped, _, _ in want] == [False, True, False, False]
    plain = list(seen_by_accelerate(make, None))
    scaled = list(seen_by_accelerate(make, scalers[1]))
    assert [seen[:2] for seen in plain] == [seen[:2] for seen in want]
    assert [seen[:2] for seen in scaled] == [seen[:2] for seen in want]
    assert scalers[1].get_scale() == scalers[0].get_scale() == 512.0
    # The scale was divided out.
    assert [seen[2] for seen in scaled[::2]] == pytest.approx([seen[2] for seen in plain[::2]])


# --- Lightning ---


def plain_steps(rank, world, last):
    """What lightning_module.py does, without Lightning."""
    tiny = example("tiny_model")
    model = tiny.make_model()
    optimizer = dmuond.torch.Muon(model, **OPTIONS)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    for step in range(last):
        tokens = tiny.batch(step)
        tiny.loss_of(model(tokens), tokens).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    optimizer.close()
    return tiny.digest(model)


def test_lightning_is_the_plain_loop_and_goes_on_from_its_checkpoint(run, ranks, address, tmp_path):
    needs.package("lightning")
    (tmp_path / "whole").mkdir()
    (tmp_path / "half").mkdir()
    whole = run("lightning_module.py", tmp_path / "whole", "6")
    assert whole["weights"][1] == ranks.run(plain_steps, 1, [address], 6)[0]
    run("lightning_module.py", tmp_path / "half", "3")
    again = run("lightning_module.py", tmp_path / "half", "6", "--resume")
    assert steps(again) == [4, 5, 6]
    assert_goes_on(whole, again)


FIND_AND_FIT_TWICE = """
import sys, dmuond.torch, lightning, lightning_module, torch
from lightning.pytorch.tuner import Tuner
class Module(lightning_module.Module):
    lr = 1e-2
    def configure_optimizers(self):
        return dmuond.torch.Muon(self, lr=self.lr, max_grad_norm=1.0, verbose=False)
module, loader = Module(), torch.utils.data.DataLoader(range(1000))
quiet = dict(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
             enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[1])
trainer = lightning.Trainer(max_steps=3, **quiet)
Tuner(trainer).lr_find(module, loader, num_training=4, update_attr=False)
trainer.fit(module, loader)
lightning.Trainer(max_steps=3, **quiet).fit(module, loader)
print("weights", lightning_module.digest(module), flush=True)
"""


def two_plain_loops(rank, world, last):
    tiny = example("tiny_model")
    model = tiny.make_model()
    for _ in range(2):
        optimizer = dmuond.torch.Muon(model, lr=1e-2, max_grad_norm=1.0, verbose=False)
        for step in range(last):
            tokens = tiny.batch(step)
            tiny.loss_of(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    return tiny.digest(model)


def test_lightning_finds_a_rate_and_fits_twice_as_plain_loops_do(run, ranks, address, tmp_path):
    """While its last optimizer is still there; and nobody closes any."""
    needs.package("lightning")
    (tmp_path / "find_and_fit.py").write_text(FIND_AND_FIT_TWICE)
    found = run(tmp_path / "find_and_fit.py", tmp_path)
    assert found["weights"][1] == ranks.run(two_plain_loops, 1, [address], 3)[0]


# --- torchtitan's way, with DCP ---


def titan(rank, world, folder, last):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        example("titan_loop").main(folder, last)
    return lines(output.getvalue())


def test_a_torchtitan_loop_goes_on_with_more_and_with_fewer_ranks(ranks, address, tmp_path):
    def train(world, folder, last):
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        arguments = (str(tmp_path / folder), last)
        return ranks.run(titan, world, [address], *arguments, environment=environment)[0]

    whole = train(2, "whole", 6)
    train(2, "2", 3)
    for folder in ("4", "1"):
        shutil.copytree(tmp_path / "2", tmp_path / folder)
    same, more, fewer = train(2, "2", 6), train(4, "4", 6), train(1, "1", 6)
    assert steps(same) == [4, 5, 6]
    assert_goes_on(whole, same)
    for other in (more, fewer):
        assert other.keys() == same.keys()
        for step in ("step 4", "step 5", "step 6"):
            _, _, norm, rate = other[step]
            assert float(norm) == pytest.approx(float(whole[step][2]), rel=1e-4)
            assert rate == whole[step][3]


# --- loggers ---


def test_steps_go_to_tensorboard(run, tmp_path):
    needs.package("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run("log_tensorboard.py", tmp_path, "3")
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    logged = {
        tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }
    assert logged["loss"] == logged["dmuond/gradient_norm"] == [1, 2, 3]
    assert [event.value for event in events.Scalars("dmuond/step")] == [1, 2, 3]


FAKE_WANDB = """
import contextlib, json, pathlib
class Run:
    def __init__(self, folder): self.path = pathlib.Path(folder, "logged")
    def log(self, values, step):
        with self.path.open("a") as file: print(json.dumps([step, values]), file=file)
@contextlib.contextmanager
def init(project, dir, config):
    assert "What is guessed" in config["explain"]
    yield Run(dir)
"""


def test_steps_go_to_wandb(run, tmp_path):
    """Where the package is not there, what stands for it writes the calls down."""
    there = importlib.util.find_spec("wandb") is not None
    stand_in = tmp_path / "stand-in"
    if not there:
        stand_in.mkdir()
        (stand_in / "wandb.py").write_text(FAKE_WANDB)
    run("log_wandb.py", tmp_path, "3", modules=() if there else (stand_in,))
    if there:
        (logged,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
        assert b"gradient_norm" in logged.read_bytes()
    else:
        logged = [json.loads(line) for line in (tmp_path / "logged").read_text().splitlines()]
        assert [step for step, _ in logged] == [1, 2, 3]
        assert all(values["step"] == step and "loss" in values for step, values in logged)
