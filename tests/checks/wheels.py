"""What is in NVIDIA's wheels, for the checks of launch/check-kernels: headers, and the symbols that libraries export.

As a program (FOLDER WHICH) it installs releases below FOLDER, the oldest and the newest that ddp claims as far as there are
wheels, and prints their folders. WHICH is a number or `all`. Of libraries, which are large, it
keeps the symbols alone, but for cuBLASLt."""

import pathlib, shutil, subprocess, sys

# Each with the wheels that its headers include.
OLD = ["nvidia-cuda-runtime-cu12==12.0.107", "nvidia-cuda-nvcc-cu12==12.0.76"]
NEW = ["nvidia-cuda-runtime==13.5.37", "nvidia-cuda-crt==13.5.37"]
RELEASES = {
    "driver, oldest": ["nvidia-cuda-runtime-cu11==11.7.99"],
    "driver, newest": NEW,
    "NVRTC, oldest": ["nvidia-cuda-nvrtc-cu12==12.0.76"],
    "NVRTC, newest": ["nvidia-cuda-nvrtc==13.5.37"],
    "NCCL, oldest": ["nvidia-nccl-cu12==2.18.1", *OLD],
    "NCCL, newest": ["nvidia-nccl-cu13==2.32.3", *NEW],
    "cuBLASLt, oldest": ["nvidia-cublas-cu12==12.0.1.189", *OLD],
    "cuBLASLt, newest": ["nvidia-cublas==13.10.0.20", *NEW],
}


def header(folder, name):
    """A header of the wheels in a folder, or None."""
    return next(iter(sorted(folder.glob(f"nvidia/**/include/{name}"))), None)


def exported(folder, library):
    """The symbols that a library exports, None if it is not there."""
    kept = next(folder.glob(f"{library}.symbols"), None)
    if kept is not None:
        return set(kept.read_text().split())
    found = [path for path in sorted(folder.glob(f"nvidia/**/{library}.so*")) if ".alt." not in path.name]
    return symbols(found[0]) if found else None


def symbols(path):
    lines = subprocess.run(["nm", "-D", "--defined-only", "-P", path], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    return {line.split()[0].split("@")[0] for line in lines}


def install(folder, names):
    shutil.rmtree(folder, ignore_errors=True)
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", folder, *names]
    subprocess.run(words, stdout=sys.stderr, check=True)
    for path in sorted(folder.glob("nvidia/**/*.so*")):
        library = path.name.split(".")[0]
        if library in ("libnvrtc", "libcublasLt", "libnccl") and ".alt." not in path.name:
            (folder / f"{library}.symbols").write_text("\n".join(sorted(symbols(path))))
        if library != "libcublasLt":
            path.unlink()
    (folder / "installed").write_text("\n".join(names))


def main():
    root, which = pathlib.Path(sys.argv[1]), sys.argv[2]
    for number, (title, names) in enumerate(RELEASES.items()):
        if which not in ("all", str(number)):
            continue
        folder = root / title.replace(", ", "-")
        if not (folder / "installed").exists() or (folder / "installed").read_text() != "\n".join(names):
            install(folder, names)
        print(folder)


if __name__ == "__main__":
    main()
