"""How much of an accelerator's memory may be planned for; no jax: preflight needs it too."""

HEADROOM = 0.92  # the rest is for what neither the engine nor the compiler sees
