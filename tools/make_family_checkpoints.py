"""Makes tests/families/checkpoints with transformers: a tiny random model of every family.

    python3.11 -m venv ref && ref/bin/pip install torch==2.13.0 transformers==5.19.0
    PYTHONPATH=. ref/bin/python tools/make_family_checkpoints.py [CASE ...]

Each folder is what `save_pretrained` writes (bfloat16), with expected.npz: logits of one prompt and
greedy ids of two, computed without a cache in float32 from the saved weights.  Prompts go beyond
every window, and a seed is taken only if no greedy step is a near tie.
"""

import json
import platform
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

FOLDER = Path(__file__).parents[1] / "tests" / "families" / "checkpoints"
VOCAB, LENGTH, SHORT, NUM_GREEDY = 64, 70, 40, 64
SMALLEST_GAP = 2e-3  # between the two best logits of a greedy step
WINDOW = 13  # no multiple of a block

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA = SMALL | {"head_dim": 16, "query_pre_attn_scalar": 12, "sliding_window": WINDOW}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 1.7, 4.0],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name: model_type, config
    "llama": ("llama", SMALL),
    "qwen2": ("qwen2", SMALL | {"tie_word_embeddings": True}),
    "qwen2_window": (
        "qwen2",
        SMALL | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", SMALL | {"head_dim": 16}),
    "qwen3_moe": (
        "qwen3_moe",
        SMALL
        | {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
    "mistral": ("mistral", SMALL | {"sliding_window": WINDOW, "head_dim": 16}),
    "mixtral": ("mixtral", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": (
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "gemma3_text",
        GEMMA
        | {
            "num_hidden_layers": 4,
            "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "phi3": (
        "phi3",
        SMALL
        | {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 32,
            "tie_word_embeddings": True,
        },
    ),
    "phi3_window": ("phi3", SMALL | {"sliding_window": WINDOW}),
    "olmo2": ("olmo2", SMALL),
    "granite": (
        "granite",
        SMALL
        | {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
        },
    ),
}


def main(names: list[str]) -> None:
    for name in names or CASES:
        for seed in range(50):
            if make(name, seed):
                break
        else:
            raise RuntimeError(f"{name}: no seed gives clear greedy steps")
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
    }
    (FOLDER / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


def make(name: str, seed: int) -> bool:
    """Writes the case; False, and nothing, when a greedy step is a near tie or the model repeats
    itself."""
    model_type, values = CASES[name]
    config = transformers.AutoConfig.for_model(model_type, **values)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for key, weight in model.named_parameters():
            value = start(key, weight, gemma=model_type.startswith("gemma"))
            weight.copy_(value.to(torch.bfloat16))
    model.eval()
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(3, VOCAB, length).tolist() for length in (LENGTH, SHORT)]
    if any(gap < SMALLEST_GAP for _, gap in (greedy(model, prompt) for prompt in prompts)):
        return False
    folder = FOLDER / name
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    arrays: dict[str, Any] = {"logits": forward(model, prompts[0])}
    for prompt in prompts:
        ids, gap = greedy(model, prompt)
        arrays |= {
            f"prompt.{len(prompt)}": np.array(prompt),
            f"greedy.{len(prompt)}": np.array(ids),
        }
        print(f"{name} seed {seed}: gap {gap:.2g}, {len(set(ids))} different ids")
    np.savez_compressed(folder / "expected.npz", **cast("dict[str, Any]", arrays))
    return True


def start(name: str, weight: Any, *, gemma: bool) -> Any:
    """Values whose logits spread over a few units, with norms and biases that matter."""
    noise = torch.randn_like(weight)
    if gemma and name == "model.norm.weight":
        return 7 + noise
    if "norm" in name:
        return 0.2 * noise if gemma else 1 + 0.2 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    if "embed" in name or "lm_head" in name:
        return (0.06 if gemma else 0.3) * noise
    return (1.6 if "q_proj" in name or "k_proj" in name else 1.9) * noise / weight.shape[-1] ** 0.5


def forward(model: Any, ids: list[int]) -> np.ndarray:
    """f32[T, V] logits of one call without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def greedy(model: Any, prompt: list[int]) -> tuple[list[int], float]:
    """Ids, all tokens computed anew at every step, and the smallest gap; 0: it repeats itself."""
    known, gap = list(prompt), np.inf
    for _ in range(NUM_GREEDY):
        last = forward(model, known)[-1]
        second, best = np.partition(last, -2)[-2:]
        gap = min(gap, float(best - second))
        known.append(int(last.argmax()))
        if gap < SMALLEST_GAP or len(known) == len(prompt) + 12 and len(set(known[-12:])) < 5:
            return known, 0.0
    return known[len(prompt) :], gap


if __name__ == "__main__":
    main(sys.argv[1:])
