"""Prints the licences of all crates that are part of ddp-train, with their texts.

usage: third_party.py <METADATA, the output of `cargo metadata` with the features of the build
"""

import json
import pathlib
import sys

NAMES = ("license", "licence", "copying", "notice", "copyright", "unlicense")


def parts_of(metadata):
    """The packages that the program links: those of our own members are left out."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    packages = {package["id"]: package for package in metadata["packages"]}
    root = next(id for id, package in packages.items() if package["name"] == "ddp")
    found, to_visit = set(), [root]
    while to_visit:
        id = to_visit.pop()
        if id in found:
            continue
        found.add(id)
        for dependency in nodes[id]["deps"]:
            # None is an ordinary dependency; others are for builds and tests.
            if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                to_visit.append(dependency["pkg"])
    parts = [packages[id] for id in found if packages[id]["source"] is not None]
    return sorted(parts, key=lambda package: (package["name"], package["version"]))


def texts_of(package):
    """The texts of a package's licences and notices."""
    folder = pathlib.Path(package["manifest_path"]).parent
    files = [file for file in sorted(folder.iterdir()) if file.is_file()]
    files = [file for file in files if file.name.lower().startswith(NAMES)]
    return [file.read_text(errors="replace").strip() for file in files]


def main():
    parts = parts_of(json.load(sys.stdin))
    missing = [part["name"] for part in parts if not part["license"] and not texts_of(part)]
    if missing:
        sys.exit(f"third_party.py: no licence is known of {', '.join(missing)}")
    print(f"ddp-train contains {len(parts)} crates of others. Their licences:\n")
    owners = {}
    for part in parts:
        name = f"{part['name']} {part['version']}"
        print(f"{name}: {part['license'] or 'see below'}")
        for text in texts_of(part):
            owners.setdefault(text, []).append(name)
    for text, names in owners.items():
        print(f"\n{'=' * 80}\n{', '.join(names)}\n{'=' * 80}\n\n{text}")


main()
