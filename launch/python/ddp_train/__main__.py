"""`python -m ddp_train`: becomes the program that was installed with this package."""

import os
import sys

from ._program import find_program

if __name__ == "__main__":
    try:
        program = find_program()
    except FileNotFoundError as error:
        sys.exit(f"ddp_train: {error}")
    os.execv(program, [program, *sys.argv[1:]])
