"""The list of hand-made faults fits the code; `python tools/mutate.py` tries them, in an hour."""

from pathlib import Path

import pytest

from tools import mutate

FILE = Path(mutate.__file__).with_name("mutations.toml")


def test_every_fault_can_be_put_in():
    mutations = mutate.load(FILE)
    mutate.check_texts(mutations)
    assert len(mutations) >= 60


def test_a_text_that_has_gone_is_named(tmp_path: Path):
    (tmp_path / "list.toml").write_text(
        '[tests]\nx = []\n[[mutation]]\nname = "gone"\nfile = "tools/mutate.py"\n'
        'find = "never there"\nreplace = ""\nwhy = ""\ntests = "x"\n'
    )
    with pytest.raises(mutate.BadMutation, match="gone: its text occurs 0 times"):
        mutate.check_texts(mutate.load(tmp_path / "list.toml"))
