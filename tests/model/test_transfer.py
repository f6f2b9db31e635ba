"""What is tuned small holds large: factors by hand, and activations that stay the same size at any width and depth."""

from __future__ import annotations

import pytest
import torch
from head_options import ALL_KINDS, SCORES, words_of

from andrea.api.command_line import configure
from andrea.config import RunConfig, UserError
from andrea.model import GPT, initialise
from andrea.model.transfer import Factors, Transfer
from andrea.training.loss.loss import loss_sum_from_hidden
from andrea.training.optimizer import Optimizer
from andrea.training.parallel.ranks import Parallel

pytestmark = pytest.mark.untraced

N_VOCAB, N_TOKEN, N_BATCH, STEPS = 7, 11, 3, 6
SEEDS = (0, 10, 20)
D_HEAD = 16
SIZES = {  # (d_model, n_layer), the first being the one that the rates are tuned at
    "width": [(32, 2), (64, 2), (128, 2), (256, 2)],
    "depth": [(32, 4), (32, 8), (32, 16), (32, 32)],
}


def configured(*words: str, d_model: int = 32, n_layer: int = 2) -> RunConfig:
    return configure(
        RunConfig,
        "train",
        [
            f"model.d_model={d_model}",
            f"model.n_layer={n_layer}",
            f"model.n_head={d_model // D_HEAD}",
            f"model.d_mlp={2 * d_model}",
            f"model.sequence_length={N_TOKEN}",
            f"train.tokens_per_step={N_TOKEN}",
            "optimizer.warmup_steps=0",
            *words,
        ],
    )


def test_factors_by_hand() -> None:
    """Four times wider, twice deeper: the table of andrea/model/transfer.py, line by line."""
    transfer = Transfer(wider=4.0, deeper=2.0)
    assert transfer.factors("embedding.weight") == Factors(1, 1, 1, 1 / 4)
    assert transfer.factors("blocks.1.attention_norm.weight") == Factors(1, 1, 1, 1 / 8)
    assert transfer.factors("blocks.1.attention.compatibility.matrix") == Factors(1, 1, 1, 1 / 8)
    assert transfer.factors("blocks.1.attention.sink") == Factors(1, 1, 1, 1 / 8)
    assert transfer.factors("blocks.1.attention.query_norm") == Factors(1, 1, 1, 1 / 8)
    assert transfer.factors("blocks.1.mlp.gate.weight") == Factors(1, 1 / 4, 1, 1 / 8)
    assert transfer.factors("blocks.1.attention.value_embedding.table.weight") == Factors(1, 1, 1, 1 / 8)
    assert transfer.factors("blocks.1.attention.value_embedding.projection.weight") == Factors(1, 1 / 4, 1, 1 / 8)
    assert transfer.factors("blocks.1.attention.gate.weight") == Factors(1, 1 / 4, 1, 1 / 8)
    assert transfer.factors("blocks.1.mlp.down.weight") == Factors(2**-0.5, 1 / 8, 1 / 2, 1 / 4)
    assert transfer.factors("blocks.1.attention.output.bias") == Factors(1, 1 / 2, 1, 1 / 4)
    assert transfer.factors("final_norm.weight") == Factors(1, 1, 1, 1 / 4)
    assert transfer.factors("head.weight") == Factors(1 / 4, 1 / 4, 1, 1)
    assert Transfer(4.0, 2.0, tied_head=True).factors("final_norm.weight") == Factors(1 / 4, 1 / 4, 1, 1)


def test_attention_s_output_follows_what_it_reads() -> None:
    """Heads of 48 instead of 16, at four times the width: the output projection reads 12 times as many numbers."""
    run = configured("model.d_head=48", "optimizer.tuned_d_model=32", "optimizer.tuned_n_layer=1", d_model=128)
    transfer = Transfer.of(run.model, run.optimizer)
    assert transfer.factors("blocks.1.attention.output.weight") == Factors(2**-0.5, 1 / 24, 1 / 2, 1 / 4)
    assert transfer.factors("blocks.1.mlp.down.weight") == Factors(2**-0.5, 1 / 8, 1 / 2, 1 / 4)
    model = GPT(run.model, run.attention, N_VOCAB)
    initialise(model, torch.Generator().manual_seed(0), transfer)
    expected = 0.5 / (8 * 48) ** 0.5 / 2 / 2**0.5  # by its columns, for two layers, and L = 2
    assert float(model.blocks[0].attention.output.weight.detach().std()) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("model", ["andrea-nano", "gpt2", "nano-llama"])
def test_at_the_tuned_size_nothing_changes(model: str, optimizer: str) -> None:
    words = [f"model={model}", f"optimizer={optimizer}", "model.n_kv_head=null"]
    here = configured(*words, "optimizer.tuned_d_model=32", "optimizer.tuned_n_layer=2")
    plain = configured(*words, "optimizer.tuned_d_model=null", "optimizer.tuned_n_layer=null")
    assert all(torch.equal(one, two) for one, two in zip(trained(here), trained(plain), strict=True))


def test_the_rates_are_of_the_size_named_or_of_none() -> None:
    with pytest.raises(UserError, match="optimizer.tuned_n_layer"):
        configured("optimizer.tuned_d_model=null")


def trained(run: RunConfig) -> list[torch.Tensor]:
    model, _ = a_few_steps(run, steps=2)
    return [parameter.detach() for parameter in model.parameters()]


def a_few_steps(run: RunConfig, steps: int, seed: int = 0) -> tuple[GPT, list[float]]:
    """The model after `steps` on one batch, and mean |x| of what it then computes: middle and last block, logits."""
    model = GPT(run.model, run.attention, N_VOCAB)
    initialise(model, torch.Generator().manual_seed(seed), Transfer.of(run.model, run.optimizer))
    optimizer = Optimizer(Parallel(model), run.optimizer, bf16=False)
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = torch.randint(N_VOCAB, (N_BATCH, N_TOKEN), generator=generator)
    targets = (3 * tokens + 1) % N_VOCAB  # something to learn: noise that is memorised would hide the sizes
    for _ in range(steps):
        (loss_sum_from_hidden(model, model(tokens), targets) / targets.numel()).backward()
        optimizer.clip()
        optimizer.step(1.0, torch.tensor(True))
        optimizer.parallel.zero_gradients()
    outputs: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: outputs.append(output[0]))
    with torch.no_grad():
        logits = model.logits(model(tokens))
    looked_at = (outputs[len(outputs) // 2 - 1], outputs[-1], logits)
    return model, [float(activation.abs().mean()) for activation in looked_at]


def growth(optimizer: str, along: str, transfer: bool, words: list[str]) -> list[float]:
    """The coordinate check (Yang et al. 2022, appendix D): the exponents with which activations grow with the size.

    That is the slope of log mean |x| over log size, of the middle block, the last, and the logits. The logarithms are means
    over SEEDS: of a single seed, a slope that is flat differs from 0 by up to 0.12.
    """
    (tuned_d_model, tuned_n_layer), sizes = SIZES[along][0], SIZES[along]
    words = [
        *words,
        f"optimizer={optimizer}",
        f"optimizer.tuned_d_model={tuned_d_model if transfer else 'null'}",
        f"optimizer.tuned_n_layer={tuned_n_layer if transfer else 'null'}",
        "model.logit_softcap=null",
        *(["optimizer.learning_rate=0.01"] if optimizer == "adamw" else []),
    ]
    runs = [configured(*words, d_model=d_model, n_layer=n_layer) for d_model, n_layer in sizes]
    found = [[a_few_steps(run, STEPS, seed)[1] for seed in SEEDS] for run in runs]
    log_size = torch.tensor([size[0] * size[1] for size in sizes], dtype=torch.float64).log()
    log_size -= log_size.mean()
    log_activation = torch.tensor(found, dtype=torch.float64).log().mean(1).T  # (3, sizes)
    return (log_activation @ log_size / log_size.square().sum()).tolist()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("along", SIZES)
@pytest.mark.parametrize(
    ("words", "nearly"),
    [
        (["model.tied_head=false", "model.value_residual=false"], 0.1),
        ([], 0.17),
        pytest.param(words_of(ALL_KINDS), 0.17, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(words_of(SCORES), 0.17, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(words_of("bigrams"), 0.17, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
    ids=["plain", "default", "options of the heads", "sinks", "bigrams"],
)
def test_activations_are_flat_over_width_and_depth(along: str, optimizer: str, words: list[str], nearly: float) -> None:
    flat, swelling = (growth(optimizer, along, transfer, words) for transfer in (True, False))
    assert max(map(abs, flat)) < nearly, (flat, swelling)
    assert max(swelling) > 0.35, (flat, swelling)
