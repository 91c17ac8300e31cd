"""`python -m ddp_train`: becomes the program that was installed with this module."""

import os
import site
import sys
import sysconfig


def find_program():
    """The path of ddp-train among the scripts of this environment, of the user, or beside us."""
    folders = [
        sysconfig.get_path("scripts"),
        os.path.join(site.getuserbase(), "bin"),
        # After `pip install --target FOLDER`.
        os.path.join(os.path.dirname(os.path.dirname(__file__)), "bin"),
    ]
    for folder in folders:
        path = os.path.join(folder, "ddp-train")
        if os.access(path, os.X_OK):
            return path
    sys.exit(
        "ddp_train: no program ddp-train in "
        + ", ".join(folders)
        + "; help: pip install --force-reinstall ddp-train"
    )


if __name__ == "__main__":
    program = find_program()
    os.execv(program, [program, *sys.argv[1:]])
