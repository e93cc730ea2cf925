"""Every family through the whole engine: 64 greedy ids of transformers, whatever the chunks, with
requests preempted and prefixes cached.

The default run takes a few families; all of them: python -m pytest -m slow tests/families
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.build import assemble
from jaxserve.config import (
    BucketConfig,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
)
from jaxserve.engine import Engine, ModelLimits
from jaxserve.kv.groups import row_blocks
from jaxserve.request import SamplingParams
from tests.equivalence.rig import (
    EOS,
    ONLY_GREEDY,
    Poisoner,
    generate,
    refuse_growth,
    write_tokenizer,
)
from tests.families.cases import LENGTH, NAMES, NUM_GREEDY, SHORT, VOCAB, Case, case

BLOCK = 8
MAX_LEN = LENGTH + NUM_GREEDY + 2
CHUNKS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 13, MAX_LEN)
TIGHT, ROOMY = 1.5, 4  # pool to what the longest of three requests (17 + 13 + 13 blocks) needs
REFUSED = (4, 9, 25)  # wishes for a block: where a window lets blocks go, TIGHT may be enough
FEW = ("gemma3", "mistral", "qwen3_moe")
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=NUM_GREEDY, ignore_eos=True, logprobs=1, prompt_logprobs=1
)


class FamilyRig:
    """One family's committed checkpoint behind the real engine and runner."""

    def __init__(self, folder: Path, case: Case) -> None:
        shutil.copytree(case.folder, folder, dirs_exist_ok=True)
        write_tokenizer(folder)
        config = EngineConfig(
            model=ModelConfig(name=str(folder), dtype="float32", max_len=MAX_LEN),
            cache=CacheConfig(block_size=BLOCK, num_blocks=256),
            scheduler=SchedulerConfig(
                token_budget=MAX_LEN, max_seqs=3, chunk_size=MAX_LEN, watermark=0.0
            ),
            buckets=BucketConfig(tokens=(16, MAX_LEN), rows=(3,)),
            sampling=ONLY_GREEDY,
            runner=RunnerConfig(compile_cache="off", prove=True),
        )
        self.assembly = assemble(config)

    def engine(self, chunk: int, share: float) -> Engine:
        """A fresh engine on a cache full of NaN, also where blocks were let go; nothing reserved:
        with a tight pool it preempts.

        The pool is the first part of the one that was compiled.
        """
        runner = self.assembly.runner

        def nan(array: jax.Array) -> jax.Array:
            return jax.device_put(np.full(array.shape, np.nan, array.dtype), array.sharding)

        runner.state.kv = jax.tree.map(nan, runner.state.kv)
        scheduler = dataclasses.replace(
            self.assembly.config.scheduler,
            mode="fixed",
            chunk_size=chunk,
            reserve_full_prompt=False,
        )
        windows = self.assembly.engine.limits.windows
        num_blocks = int(share * row_blocks(windows, MAX_LEN, BLOCK, chunk))
        cache = dataclasses.replace(self.assembly.config.cache, num_blocks=num_blocks)
        config = dataclasses.replace(self.assembly.config, scheduler=scheduler, cache=cache)
        engine = Engine(config, runner, ModelLimits(VOCAB, frozenset({EOS}), windows))
        Poisoner(engine, runner)
        return engine


def check(rig: FamilyRig, expected: Case, chunk: int) -> None:
    engine = rig.engine(chunk, TIGHT)
    refuse_growth(engine, REFUSED)
    prompts = [expected.prompts[length] for length in (LENGTH, SHORT, SHORT)]
    unscored = dataclasses.replace(GREEDY, prompt_logprobs=None)  # takes prefix hits
    sampling = [GREEDY, GREEDY, unscored]
    for _ in range(2):
        answers = generate(engine, prompts, sampling)
        for answer, prompt in zip(answers, prompts, strict=True):
            assert answer.tokens == expected.greedy[len(prompt)], f"chunks of {chunk}"
    assert engine.stats.preemptions >= 1
    logits = expected.logits.astype(np.float64)
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    scores: Any = answers[0].prompt_logprobs
    found = [entry.logprob for entry in scores[1:]]
    wanted = logprobs[np.arange(LENGTH - 1), prompts[0][1:]]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    engine = rig.engine(chunk, ROOMY)
    for hit in (0, SHORT - 1):
        (answer,) = generate(engine, prompts[1:2], unscored)
        assert answer.tokens == expected.greedy[SHORT], f"chunks of {chunk}"
        assert answer.request.num_cached == hit // BLOCK * BLOCK


@pytest.mark.parametrize("name", FEW)
def test_greedy_ids_equal_transformers(tmp_path: Path, name: str) -> None:
    rig = FamilyRig(tmp_path, case(name))
    check(rig, case(name), BLOCK + 1)
    rig.assembly.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_matrix(tmp_path: Path, name: str) -> None:
    """Families times chunk sizes, each with preemption, prefix hits and overlap."""
    rig = FamilyRig(tmp_path, case(name))
    for chunk in CHUNKS:
        check(rig, case(name), chunk)
    rig.assembly.close()
