"""Prints launch/python/ddp_train/_settings.pyi: the program's settings with types, for type checkers."""

import textwrap

from ddp_train._program import keywords

HEAD = '''# Made by tests/python/stub.py from `ddp-train settings`; launch/test checks that it is up to date.

import os
from collections.abc import Mapping, Sequence
from typing import Literal, Optional, TypedDict, Union

Value = Union[str, float, os.PathLike[str], Sequence[Union[str, float]], Mapping[str, float], None]

class Settings(TypedDict, total=False):'''


def kind(choices):
    if choices == ["true", "false"]:
        return "Optional[bool]"
    return f"Optional[Literal[{', '.join(map(repr, choices))}]]".replace("'", '"') if choices else "Value"


print(HEAD)
for name, flag in keywords().items():
    help = textwrap.fill(flag["help"].replace("\\", "\\\\"), 96, subsequent_indent="    ")
    print(f'    {name}: {kind(flag["choices"])}\n    """{help}"""')
