"""A checkpoint as a model of lm-eval. Importing this module registers it there under the name `andrea`.

lm-eval asks for log-probabilities of continuations, of whole texts, and for generated text. A text begins a document: as in
training, end-of-text is put in front of it, but not in front of the text of a rolling log-likelihood, whose windows bring it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from andrea.config import UserError
from andrea.evaluation.scoring import Subject, load_subject, rolling_windows
from andrea.generation.engine import Engine, Request
from andrea.generation.sampling import Sampling
from andrea.runtime.device import is_available

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

DEFAULT_BATCH = 16
DEFAULT_NEW_TOKENS = 256  # as other models of lm-eval have it
NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens")  # names of one setting


@register_model("andrea")
@final
class AndreaLM(TemplateLM):
    """Computes in fp32. Its arguments are those of `--model_args` and of lm-eval's command line.

    checkpoint, runs_dir, device, trust: as the keys of configs/evaluate.yaml. subject: a model that is loaded already.
    batch_size: sequences read at once; lm-eval's `auto` means DEFAULT_BATCH. max_batch_size has no effect.
    """

    def __init__(
        self,
        checkpoint: str | None = None,
        runs_dir: str = "runs",
        device: str = "auto",
        batch_size: int | str = DEFAULT_BATCH,
        max_batch_size: int | None = None,
        trust: bool = False,
        subject: Subject | None = None,
    ) -> None:
        super().__init__()
        n_batch = DEFAULT_BATCH if str(batch_size).startswith("auto") else int(batch_size)
        if device.startswith("cuda") and not is_available("cuda"):
            device = "auto"  # lm-eval's command line asks for cuda:0 where the user asks for nothing
        self.subject = subject or load_subject(checkpoint, runs_dir, device, n_batch, trust)
        self.n_batch = n_batch
        self.engine = Engine(self.subject.gpt, self.subject.tokenizer)  # without a dtype it copies no weights
        self._device = self.engine.device

    @property
    def eot_token_id(self) -> int:
        return self.subject.tokenizer.end_of_text

    @property
    def max_length(self) -> int:
        return self.subject.gpt.config.sequence_length

    @property
    def tokenizer_name(self) -> str:
        return self.subject.tokenizer.identity

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results about the model."""
        checkpoint = self.subject.checkpoint
        return {"checkpoint": str(checkpoint.path), "step": checkpoint.step, "tokenizer": self.tokenizer_name}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        ids = self.subject.tokenizer.encode(string)
        return ids if add_special_tokens is False else [self.eot_token_id, *ids]

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        with tqdm(total=len(requests), desc="log-likelihoods", disable=disable_tqdm) as bar:
            scores = self.subject.scorer.score([(context, answer) for _, context, answer in requests], bar.update)
        found = [(score.nats, score.is_greedy) for score in scores]
        for (texts, _, _), each in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, each)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows = []
        for index, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows += [(index, window) for window in rolling_windows(ids, self.eot_token_id, self.max_length)]
        with tqdm(total=len(windows), desc="windows of rolling log-likelihoods", disable=disable_tqdm) as bar:
            scores = self.subject.scorer.score([window for _, window in windows], bar.update)
        found = [0.0] * len(requests)
        for (index, _), score in zip(windows, scores, strict=True):
            found[index] += score.nats
        for request, nats in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, nats)
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        texts = [""] * len(requests)
        by_settings: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_settings.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        with tqdm(total=len(requests), desc="generated texts", disable=disable_tqdm) as bar:
            for indices in by_settings.values():
                for first in range(0, len(indices), self.n_batch):
                    batch = indices[first : first + self.n_batch]
                    arguments = [requests[index].args for index in batch]
                    for index, text in zip(batch, self.write(arguments), strict=True):
                        texts[index] = text
                        self.cache_hook.add_partial("generate_until", requests[index].args, text)
                    bar.update(len(batch))
        return texts

    def write(self, arguments: list[tuple[str, dict[str, Any]]]) -> list[str]:
        """The text that follows each (context, settings); the settings are equal. A context keeps as many of its last
        tokens as fit the window together with the new ones."""
        request = request_of(arguments[0][1], len(arguments))
        n_context = max(1, self.max_length - request.max_new_tokens)
        prompts = [self.tok_encode(context)[-n_context:] for context, _ in arguments]
        texts = [""] * len(prompts)
        for token in self.engine.stream_all(prompts, request):
            texts[token.sample] += token.text
        return texts


def request_of(settings: dict[str, Any], n_text: int) -> Request:
    """What lm-eval calls generation_kwargs, as our request. Raises UserError for a setting that we do not have."""
    left = dict(settings)
    until = left.pop("until", None) or []
    n_new = [left.pop(name) for name in NEW_TOKENS if name in left]
    is_random = left.pop("do_sample", None)
    temperature = float(left.pop("temperature", 0.0 if not is_random else 1.0))
    sampling = Sampling(
        temperature if is_random is not False else 0.0,
        left.pop("top_k", None),
        left.pop("top_p", None),
        left.pop("min_p", None),
    )
    if left:
        allowed = ", ".join(["until", *NEW_TOKENS, "do_sample", "temperature", "top_k", "top_p", "min_p"])
        raise UserError(f"generation_kwargs has {', '.join(left)}, which this model does not know; allowed: {allowed}")
    return Request(
        max_new_tokens=int(n_new[0]) if n_new else DEFAULT_NEW_TOKENS,
        num_samples=n_text,
        stop=tuple(each for each in ([until] if isinstance(until, str) else until) if each),
        sampling=sampling,
    )
