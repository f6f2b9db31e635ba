"""bench/options.py: its figures see each option, and switching an option off leaves the model without it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from head_options import draw_what_starts_alike

from andrea.api.command_line import configure
from andrea.config import RunConfig
from andrea.insight.lens.trace import trace_layers
from andrea.model.gpt import GPT, initialise

BENCH = Path(__file__).resolve().parents[2] / "bench"
TINY = "model.d_model=24 model.n_layer=4 model.n_head=3 model.d_mlp=32 model.sequence_length=160 train.tokens_per_step=1600".split()


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import options

    yield options
    sys.modules.pop("options")


def model_of(words: list[str]) -> GPT:
    config = configure(RunConfig, "train", [*TINY, *words])
    model = GPT(config.model, config.attention, 50)
    initialise(model, torch.Generator().manual_seed(1))
    draw_what_starts_alike(model)
    return model.eval()


NAMES = """convolution gate gate-elementwise sink exclusive value-embedding value-table windows alibi partial-rotary
    softcap""".split()
# What the first figure of each option is when the option does nothing.
NEUTRAL = {
    "gate": 1.0,
    "gate-elementwise": 1.0,
    "sink": 0.0,
    "value-embedding": 0.0,
    "value-table": 0.0,
    "convolution": 0.0,
}


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_figures_of_each_option(name: str, options: ModuleType) -> None:
    option, tokens = options.OPTIONS[name], torch.randint(50, (1, 160), generator=torch.Generator().manual_seed(2))
    model = model_of(option.words)

    def figures() -> dict[str, torch.Tensor]:
        window = options.Window(tokens, list(trace_layers(model, tokens)), torch.arange(160))
        return option.figures(model, window)

    found = figures()
    assert all(each.shape == (4, 3, 160) and each.isfinite().all() for each in found.values())
    first = next(iter(found))
    if option.off is None:
        assert ((found[first] > 0) & (found[first] < 1)).any()
        return
    before = model(tokens)
    for block in model.blocks:
        option.off(block.attention)
    assert not torch.allclose(model(tokens), before)
    if name in NEUTRAL:
        assert not torch.allclose(found[first], torch.tensor(NEUTRAL[name]))
        torch.testing.assert_close(figures()[first], torch.full((4, 3, 160), NEUTRAL[name]), atol=1e-6, rtol=0)
    elif name == "exclusive":
        after = figures()
        torch.testing.assert_close(after["and after"], after[first])  # nothing is taken away
    elif name == "softcap":
        largest, capped = found.values()
        torch.testing.assert_close(capped, 20 * torch.tanh(largest / 20))
    elif name == "windows":
        far = "weight at 128 tokens or more"
        assert not found[far][:3].any() and found[far][3].any() and figures()[far].any(-1).all()


def test_every_option_is_tested(options: ModuleType) -> None:
    assert list(options.OPTIONS) == NAMES


def test_where_a_figure_depends_most_on_the_token(options: ModuleType) -> None:
    tokens = torch.tensor([0, 1] * 30 + [2] * 5)
    figure = torch.zeros(2, 3, 65)
    figure[1, 2] = torch.where(tokens == 1, 0.75, 0.25)
    found = options.by_token(figure, tokens, [b"a", b"b", b"c"])
    assert found == {"head": "1.2", "lowest": [("a", 0.25), ("b", 0.75)], "highest": [("a", 0.25), ("b", 0.75)]}
    assert options.by_token(torch.ones(2, 3, 65), tokens, [b"a", b"b", b"c"]) is None
