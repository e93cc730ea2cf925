"""The shapes of published models in configs/models: their sizes add up to what was published."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from model_zoo import registry
from model_zoo.checkpoint import Checkpoint
from model_zoo.decoder_config import DecoderConfig
from model_zoo.parameters import shapes

FOLDER = Path(__file__).parents[2] / "configs" / "models"
PARAMETERS = {  # model cards, in units of 1e9
    "Qwen--Qwen2.5-7B-Instruct": 7.62,
    "Qwen--Qwen3-8B": 8.19,
    "Qwen--Qwen3-30B-A3B": 30.53,
    "mistralai--Mistral-7B-v0.1": 7.24,
    "mistralai--Mixtral-8x7B-Instruct-v0.1": 46.70,
    "google--gemma-2-9b-it": 9.24,
    "google--gemma-3-1b-it": 1.00,
    "microsoft--phi-4": 14.66,
    "allenai--OLMo-2-1124-7B-Instruct": 7.30,
    "ibm-granite--granite-3.1-8b-instruct": 8.17,
}


def config(name: str) -> DecoderConfig:
    hf = json.loads((FOLDER / f"{name}.json").read_text())
    checkpoint = Checkpoint(name, hf, {}, lambda name: np.empty(0))
    return registry.configure(checkpoint.hf_config, "bfloat16")[1]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_model_card(name: str) -> None:
    found = sum(math.prod(shape) for shape in shapes(config(name)).values())
    assert abs(found / 1e9 - PARAMETERS[name]) < 0.006 * PARAMETERS[name]


def test_windows_are_where_the_reports_say() -> None:
    """Gemma 3 (arXiv 2503.19786): five local layers, then a global one; Gemma 2: every other."""
    c = config("google--gemma-3-1b-it")
    assert [layer for layer, window in enumerate(c.windows) if window is None] == [5, 11, 17, 23]
    assert set(c.windows) == {512, None}
    assert [c.layer_ropes[layer] for layer in range(7)] == [1, 1, 1, 1, 1, 0, 1]
    assert abs(c.ropes[0].frequencies[1] - 1_000_000 ** (-2 / 256)) < 1e-9
    assert abs(c.ropes[1].frequencies[1] - 10_000 ** (-2 / 256)) < 1e-9
    c = config("google--gemma-2-9b-it")
    assert c.windows[:3] == (4096, None, 4096) and (c.attention_cap, c.logit_cap) == (50.0, 30.0)
    assert (c.attention_scale, c.tie) == (1 / 16, True)
    assert config("mistralai--Mistral-7B-v0.1").windows == (4096,) * 32
    assert config("Qwen--Qwen2.5-7B-Instruct").windows == ()
