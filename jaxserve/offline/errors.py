"""What ends a job before it starts."""


class InputError(ValueError):
    """A job cannot start, and nothing was touched: its files, its input or its settings are
    wrong."""
