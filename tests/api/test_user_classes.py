"""A user's own compatibility function and MLP, in a module outside the package: used, saved, resumed, and never run unasked."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import run_script, tiny_words, torchrun

import andrea
from andrea.__main__ import main as andrea_main
from andrea.checkpoint import read_checkpoint
from andrea.config import RunConfig, UserError, parse
from andrea.runtime.files import file_sha256

MODULE = '''
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional
from andrea.attention import Compatibility

Path({mark!r}).write_text("ran")  # leaves a trace wherever the module is imported


class Tempered(Compatibility):
    def __init__(self, n_head):
        super().__init__()
        self.heat = nn.Parameter(torch.empty(n_head))

    def initialise(self, generator=None):
        nn.init.constant_(self.heat, 2.0)

    def scores(self, query, key):
        return query @ key.mT / self.heat[:, None, None]

    def lower(self, query, key):
        return query / self.heat[:, None, None], key


class Distance(Compatibility):
    """Without a method `lower`."""

    def scores(self, query, key):
        return -(query[..., :, None, :] - key[..., None, :, :]).square().sum(-1)


class Gated(nn.Module):
    def __init__(self, d_model, d_mlp, bias):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(d_model, d_mlp, bias), nn.Tanh())
        self.norm = nn.LayerNorm(d_mlp)
        self.down = nn.Linear(d_mlp, d_model, bias)

    def forward(self, x):
        return functional.linear(self.norm(self.inner(x)), self.down.weight, self.down.bias)


class Buffered(Gated):
    def __init__(self, d_model, d_mlp, bias):
        super().__init__(d_model, d_mlp, bias)
        self.register_buffer("mean", torch.zeros(d_model))


class Leftover(Gated):
    def __init__(self, d_model, d_mlp, bias):
        super().__init__(d_model, d_mlp, bias)
        self.spare = nn.Parameter(torch.ones(d_model))


class Widening(Gated):
    def forward(self, x):
        return self.inner(x)


class Doubled(Tempered):
    def lower(self, query, key):
        return 2 * query, key


class Wanting(Compatibility):
    def __init__(self, n_planets):
        super().__init__()

    def scores(self, query, key):
        return query @ key.mT


not_a_class = 3
'''
OWN = ["attention.compatibility=my_module.Tempered", "model.mlp=my_module.Gated"]
SHORT = ["name=own", "train.steps=2", "train.eval_every=2", "train.save_every=2",
         "train.sample_tokens=4", "device=cpu"]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a folder outside the repository with my_module.py. `ran(place)` says whether that ran."""
    (tmp_path / "my_module.py").write_text(MODULE.format(mark=str(tmp_path / "mark")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    forget_module()
    yield tmp_path
    forget_module()


def forget_module() -> None:
    sys.modules.pop("my_module", None)


def ran(place: Path) -> bool:
    """Whether the module was imported since the last question; as in a new process, nothing is imported already."""
    forget_module()
    is_marked = (place / "mark").exists()
    (place / "mark").unlink(missing_ok=True)
    return is_marked


@pytest.fixture
def train(place: Path, notes: Path, script) -> Callable[..., int]:
    main = script("train")
    return lambda *words: main(tiny_words(place, notes, *words))


def state_of(place: Path, step: int) -> dict:
    return read_checkpoint(place / "runs" / "own" / "checkpoints" / f"step-{step:08d}").state


def test_trained_saved_resumed_sampled_and_in_the_lens(train, place: Path, script, capsys) -> None:
    assert train(*SHORT, *OWN) == 0
    assert capsys.readouterr().out.rstrip().endswith("trust=true")  # the printed command works as it stands
    state = state_of(place, 2)
    sha256 = file_sha256(place / "my_module.py")
    assert state["own_parts"] == {"my_module.Tempered": sha256, "my_module.Gated": sha256}
    assert state["config"]["attention"]["compatibility"] == "my_module.Tempered" and "trust" not in state["config"]
    assert "trust" not in (place / "runs" / "own" / "config.yaml").read_text()
    tensors = read_checkpoint(place / "runs" / "own" / "checkpoints" / "step-00000002").model_tensors()
    assert tensors["blocks.1.attention.compatibility.heat"].shape == (2,)
    assert not torch.equal(tensors["blocks.1.attention.compatibility.heat"], torch.full((2,), 2.0))  # it has learned
    assert ran(place)

    assert train(*SHORT, *OWN, "resume=auto", "train.steps=4", "train.save_every=1") == 0  # the same words: named again
    assert train(*SHORT, "resume=auto", "train.steps=5", "trust=true") == 0
    assert ran(place) and state_of(place, 5)["config"]["model"]["mlp"] == "my_module.Gated"
    assert "source file" not in capsys.readouterr().out

    newest = place / "runs" / "own" / "checkpoints" / "step-00000005"
    words = [f"checkpoint={newest}", "device=cpu", "trust=true"]
    code, _, err = run_script(script("sample"), [*words, "max_new_tokens=5"], capsys)
    assert code == 0 and "step 5" in err and ran(place)
    assert andrea_main(["lens", *words, "prompt=import", "out=lens.html"]) == 0
    assert "my_module.Tempered" in (place / "lens.html").read_text() and ran(place)
    loaded = andrea.load("own", trust=True)
    assert type(loaded.model.blocks[0].mlp).__name__ == "Gated" and len(loaded.generate("a", max_new_tokens=3)) > 0


def test_a_changed_module_is_named_by_every_command_that_loads_it(train, place: Path, script, capsys) -> None:
    assert train(*SHORT, *OWN) == 0
    (place / "my_module.py").write_text((place / "my_module.py").read_text() + "\n# another line\n")
    forget_module()
    words = ["checkpoint=own", "device=cpu", "trust=true"]
    named = "changed since training: my_module.Gated: its source file (sha256 "
    code, _, err = run_script(script("sample"), [*words, "max_new_tokens=2"], capsys)
    assert code == 0 and named in err
    assert andrea_main(["lens", *words, "prompt=import", "out=lens.html"]) == 0 and named in capsys.readouterr().err
    assert andrea.load("own", trust=True) and named in capsys.readouterr().err
    assert train(*SHORT, *OWN, "resume=auto", "train.steps=3") == 0
    assert "changed my_module.Gated: its source file (sha256 " in capsys.readouterr().out


def test_a_function_without_a_lowered_form(train, place: Path) -> None:
    own = ["attention.compatibility=my_module.Distance"]
    with pytest.raises(UserError, match="my_module.Distance has no method `lower`, which model.position=rotary needs"):
        train(*SHORT, *own)
    assert train(*SHORT, *own, "model.position=learned") == 0
    words = ["checkpoint=own", "device=cpu", "trust=true", "prompt=import this", "out=lens.html"]
    assert andrea_main(["lens", *words]) == 0
    loaded = andrea.load("own", trust=True, precision="fp32")
    text, logits = "import", loaded.logits("import")
    assert loaded.generate(text, max_new_tokens=1, temperature=0) == loaded.tokenizer.decode([int(logits[-1].argmax())])
    with pytest.raises(UserError, match="precision=int8 serves only the built-in"):
        andrea.load("own", trust=True, precision="int8").generate("a", max_new_tokens=1)


@pytest.mark.slow
def test_each_run_of_a_sweep_imports_what_its_command_line_names(train, place: Path) -> None:
    assert train("-m", *SHORT[1:], *OWN, "seed=1,2", "name=both") == 0
    assert len(list((place / "runs").glob("*-both/checkpoints/step-00000002"))) == 2


@pytest.mark.slow
def test_a_restarted_rank_imports_it_again(place: Path, notes: Path) -> None:
    """The module ends rank 1 in the first start, once a checkpoint is there."""
    lost = """
import os, signal
if os.environ.get("RANK") == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    class Gated(Gated):
        def forward(self, x):
            if list(Path("runs/own/checkpoints").glob("step-00000002")):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(x)
"""
    (place / "my_module.py").write_text((place / "my_module.py").read_text() + lost)
    words = tiny_words(place, notes, *SHORT, *OWN, "resume=auto", "train.steps=6", "train.save_every=1", "parallel=ddp")
    out, _ = torchrun(2, words, restarts=1).communicate(timeout=300)
    assert "resuming runs/own" in out.replace(f"{place}/", "") and "done at step 6 of 6" in out, out


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("attention.compatibility=no_module.F", "attention.compatibility=no_module.F cannot be imported: No module"),
        ("attention.compatibility=my_module.Missing", "Missing is not in the module my_module"),
        (
            "attention.compatibility=my_module.Gated",
            "must be a subclass of andrea.attention.compatibility.Compatibility",
        ),
        ("attention.compatibility=my_module.Wanting", "missing a required argument: 'n_planets'"),
        ("attention.compatibility=my_module.Compatibility", "cannot be made: it has no method `scores`"),
        ("model.mlp=my_module.not_a_class", "not_a_class is 3; it must be a subclass of torch.nn"),
        ("model.mlp=my_module.Buffered", "has the buffer mean"),
        ("model.mlp=my_module.Leftover", "blocks.0.mlp.spare gets no gradient, because the model does not use it"),
        ("model.mlp=my_module.Widening", r"its result must have this shape, but it is \(2, 3, \d+\)"),
        ("attention.compatibility=my_module.Doubled", "`lower` and `scores` differ: for query"),
    ],
)
def test_what_is_no_such_class_is_refused_by_name(train, place: Path, word: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(*SHORT, word)


@pytest.mark.parametrize("value", ["scaled_dott", "a.", ".a", "a..b", "a.b c", "1.5", "os.path;x", "a/b.c", "."])
def test_what_is_no_dotted_path_is_refused_with_what_is_allowed(value: str) -> None:
    from andrea.api.command_line import configure

    with pytest.raises(UserError, match=r"dotted path of a class of your own \(my_module.MyClass\)") as refused:
        configure(RunConfig, "train", [f"attention.compatibility={value}"])
    assert ("did you mean scaled_dot?" in str(refused.value)) == (value == "scaled_dott")


def test_a_hostile_checkpoint_runs_nothing_in_any_command(train, place: Path, script, capsys) -> None:
    """Its configuration names a module of the working directory, and says that it is trusted."""
    assert train(*SHORT) == 0
    checkpoint = place / "runs" / "own" / "checkpoints" / "step-00000002"
    hostile = {"attention": {"compatibility": "my_module.Tempered"}, "model": {"mlp": "my_module.Gated"}}
    state = json.loads((checkpoint / "state.json").read_text())
    for group, changes in hostile.items():
        state["config"][group] |= changes
    state["config"]["trust"] = True
    state["own_parts"] = {"my_module.Tempered": "0" * 64}
    rewrite(checkpoint, "state.json", json.dumps(state).encode())
    parse(RunConfig, state["config"])  # it is a configuration like any other

    refused = r"comes from a checkpoint or a saved configuration and is not imported.* add trust=true"
    words = ["checkpoint=own", "device=cpu"]
    commands = {
        "sample": lambda: script("sample")(words),
        "lens": lambda: andrea_main(["lens", *words, "prompt=a", "out=lens.html"]),
        "load": lambda: andrea.load("own"),
        "resume": lambda: train(*SHORT, "resume=auto", "train.steps=4"),
        "resume, another path named": lambda: train(*SHORT, "resume=runs/own", "train.steps=4", "trust=false"),
    }
    for name, command in commands.items():
        with pytest.raises(UserError, match=refused):
            command()
        assert not ran(place), name
    assert andrea_main(["consolidate", "checkpoint=own"]) == 0
    andrea_main(["compare", "runs", "out=compare.html"])
    with pytest.raises(UserError, match=refused):
        train(*SHORT[1:], "name=second", f"init_from={checkpoint}")
    whole = ["attention.compatibility=scaled_dot", "model.mlp=swiglu"]  # its weights alone
    train(*SHORT[1:], "name=second", f"init_from={checkpoint}", *whole)
    assert not ran(place)
    capsys.readouterr()


def rewrite(checkpoint: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint, and its entry in the manifest."""
    (checkpoint / name).write_bytes(content)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": file_sha256(checkpoint / name)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
