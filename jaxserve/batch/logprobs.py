"""From the device's log-probabilities to those of requests: of sampled tokens and of prompts."""

from collections.abc import Iterable, Sequence

from jaxserve.batch.step import Logprobs
from jaxserve.request import Output, Request, Status, TokenLogprobs
from jaxserve.scheduler.plan import Chunk


def wants_scores(request: Request) -> bool:
    """Only the first of `n` samples is scored, and only until its first output."""
    asked = request.sampling.prompt_logprobs is not None
    return asked and not request.sample and len(request.tokens) == request.num_prompt


def scored_targets(chunk: Chunk) -> list[int]:
    """Prompt tokens that the chunk's tokens predict, when the request wants their logprobs.

    Position i is scored from the hidden state at i - 1.
    """
    request = chunk.request
    if not wants_scores(request):
        return []
    end = min(chunk.start + chunk.num_tokens + 1, request.num_prompt)
    return request.tokens[chunk.start + 1 : end]


class PromptScores:
    """Prompt logprobs gathered chunk by chunk, until the first output carries them away."""

    def __init__(self) -> None:
        self._gathered: dict[Request, list[TokenLogprobs | None]] = {}

    def __len__(self) -> int:
        return len(self._gathered)

    def start(self, request: Request) -> None:
        """`request` has taken a seat, and computes its prompt from the start if it wants scores."""
        if wants_scores(request):
            self._gathered[request] = [None]

    def collect(
        self, targets: Iterable[tuple[Chunk, list[int]]], scores: Sequence[Logprobs]
    ) -> None:
        """`targets` are those the step was built with; results of ended epochs are dropped."""
        rows = len(scores[0].chosen) if scores else 1
        at = 0
        for chunk, wanted in targets:
            request = chunk.request
            count = request.sampling.prompt_logprobs or 0
            if request.epoch == chunk.epoch and request.status is Status.RUNNING:
                for i, token in enumerate(wanted, at):
                    self._gathered[request].append(
                        _entry(scores[i // rows], i % rows, token, count)
                    )
            at += len(wanted)

    def take(self, request: Request) -> tuple[TokenLogprobs | None, ...] | None:
        gathered = self._gathered.pop(request, None)
        return None if gathered is None else tuple(gathered)

    def drop(self, request: Request) -> None:
        self._gathered.pop(request, None)

    def clear(self) -> None:
        self._gathered.clear()


def attach(
    outputs: Sequence[Output],
    rows: Iterable[Request],
    logprobs: Logprobs | None,
    prompts: PromptScores,
) -> None:
    """Gives the outputs the logprobs that their requests asked for.

    `rows`: the request of each sampled row of the step.
    """
    row_of = {request: row for row, request in enumerate(rows)}
    for output in outputs:
        request, asked = output.request, output.request.sampling
        if asked.logprobs is not None and logprobs is not None and output.tokens:
            row = row_of[request]
            output.logprobs = (_entry(logprobs, row, output.tokens[0], asked.logprobs),)
        scores = prompts.take(request)
        if output.finish_reason != "error":
            output.prompt_logprobs = scores


def _entry(logprobs: Logprobs, row: int, token: int, count: int) -> TokenLogprobs:
    ids, values = logprobs.top_ids[row, :count].tolist(), logprobs.top[row, :count].tolist()
    return TokenLogprobs(
        token=token,
        logprob=float(logprobs.chosen[row]),
        rank=int(logprobs.rank[row]),
        top=tuple(zip(ids, values, strict=True)),
    )
