"""Reading config.json: every value is checked for type and size before anything is made of it."""

import math
from collections.abc import Mapping
from typing import Any

from model_zoo import rope
from model_zoo.decoder_config import DecoderConfig
from model_zoo.parameters import shapes

_SLIDING, _FULL = "sliding_attention", "full_attention"
_MOST = {  # larger than any model, small enough that nothing overflows or takes memory
    "num_hidden_layers": 10_000,
    "head_dim": 65_536,
    "num_attention_heads": 65_536,
    "num_key_value_heads": 65_536,
    "num_experts": 16_384,
    "num_local_experts": 16_384,
}
_MOST_EXPERTS = 100_000  # layers times experts
_MOST_VALUES = 10**14  # parameters
ALLOWED: dict[str, tuple[Any, ...]] = {  # options that no family here has
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "clip_qkv": (None,),
    "use_bidirectional_attention": (False, None),
}


class Fields:
    """The values of one config.json.  Every method raises ValueError, naming the key."""

    def __init__(self, hf: Mapping[str, Any], family: str, allowed: Mapping[str, tuple[Any, ...]]):
        self.hf = hf
        for name, values in (ALLOWED | dict(allowed)).items():
            value = hf.get(name, values[0])
            if not any(value is one or value == one for one in values):
                raise ValueError(
                    f"config.json: {name}={value!r} is not supported by {family}; "
                    f"supported: {', '.join(map(repr, values))}"
                )

    def size(self, name: str, default: int | None = None) -> int:
        """A positive whole number; `default` where the config has none or null."""
        value = self.hf.get(name)
        value = default if value is None else value
        most = _MOST.get(name, 2**31 - 1)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise ValueError(
                f"config.json: {name} must be a whole number from 1 to {most}, it is {value!r}"
            )
        return value

    def number(self, name: str, default: float) -> float:
        """A positive finite number."""
        value = self.hf.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise ValueError(f"config.json: {name} must be a positive number, it is {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.hf.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ValueError(f"config.json: {name} must be true or false, it is {value!r}")
        return value

    def window(self, name: str = "sliding_window", default: int | None = None) -> int | None:
        """Positions that a layer with a window sees; None: there is none."""
        if name in self.hf and self.hf[name] is None or name not in self.hf and default is None:
            return None
        return self.size(name, default)

    def cap(self, name: str, default: float | None = None) -> float | None:
        if name in self.hf and self.hf[name] is None or name not in self.hf and default is None:
            return None
        return self.number(name, default or 0.0)

    def sliding(self, default: list[bool]) -> list[bool]:
        """Which layers have the window: `layer_types`, or `default` where it is not given."""
        types = self.hf.get("layer_types")
        if types is None:
            return default
        layers = self.size("num_hidden_layers")
        if not isinstance(types, list) or len(types) != layers:
            raise ValueError(f"config.json: layer_types must be a list of {layers} types")
        unknown = [kind for kind in types if kind not in (_SLIDING, _FULL)]
        if unknown:
            raise ValueError(
                f"config.json: layer_types has {unknown[0]!r}; supported: {_SLIDING}, {_FULL}"
            )
        return [kind == _SLIDING for kind in types]

    def windows(self, window: int | None, sliding: list[bool] | None = None) -> tuple[Any, ...]:
        """`DecoderConfig.windows`: of the sliding layers, or of all."""
        if window is None:
            return ()
        sliding = [True] * self.size("num_hidden_layers") if sliding is None else sliding
        return tuple(window if slides else None for slides in sliding)

    def decoder(self, dtype: str, max_len: int, **options: Any) -> DecoderConfig:
        """The sizes, norm, rope and lengths that all configs name alike, and the `options`."""
        heads, width = self.size("num_attention_heads"), self.size("hidden_size")
        kv_heads = self.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads={heads} is no multiple of "
                f"num_key_value_heads={kv_heads}"
            )
        found = {
            "L": self.size("num_hidden_layers"),
            "D": width,
            "F": options.get("F") or self.size("intermediate_size"),
            "N": heads,
            "K": kv_heads,
            "H": self.size("head_dim", max(width // heads, 1)),
            "V": self.size("vocab_size"),
            "eps": self.number("rms_norm_eps", 1e-6),
            "tie": self.flag("tie_word_embeddings"),
            "max_position": self.size("max_position_embeddings", 2048),
            "longest": rope.longest(self.hf),
            "dtype": dtype,
        } | options
        if "ropes" not in found:
            found["ropes"] = (rope.from_hf(self.hf, head_dim=found["H"], max_len=max_len),)
        config = DecoderConfig(**found)
        self._refuse_absurd(config)
        return config

    def _refuse_absurd(self, c: DecoderConfig) -> None:
        """Sizes that pass one by one, but not together: nobody has such a model."""
        values = sum(math.prod(shape) for shape in shapes(c).values())
        if values > _MOST_VALUES or (c.moe and c.L * c.moe.experts > _MOST_EXPERTS):
            raise ValueError(
                f"config.json: its sizes make a model of {values:.1e} parameters"
                f"{f' and {c.L} x {c.moe.experts} experts' if c.moe else ''}, more than any has"
            )


def experts(fields: Fields, name: str) -> tuple[int, int]:
    """How many experts a layer has (`name`), and how many a token uses."""
    count, used = fields.size(name), fields.size("num_experts_per_tok")
    if used > count:
        raise ValueError(f"config.json: num_experts_per_tok={used} of {name}={count}")
    return count, used
