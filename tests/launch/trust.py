"""Checks of what strangers could change or read; started by tests/launch/trust.

Each check also finds planted mistakes.
"""

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

import yaml


def text(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def wrong_in_workflow(workflow):
    """Tags can be moved to other commits; and a job gets every permission that it is not denied."""
    if yaml.safe_load(workflow).get("permissions") != {"contents": "read"}:
        yield "permissions: expected contents: read and no other"
    for name, job in yaml.safe_load(workflow)["jobs"].items():
        if "permissions" in job:
            yield f"job {name} has permissions of its own"
        for step in job["steps"]:
            action = step.get("uses", "")
            if action and not re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", action):
                yield f"{action}: expected the hash of a commit"
            if action.startswith("actions/checkout@") and step.get("with", {}).get("persist-credentials") is not False:
                yield f"job {name} leaves its credentials in the checkout"
    for line in re.findall(r"cargo install [^&\n]*", workflow):
        if "--locked" not in line or not re.search(r"@\d+\.\d+\.\d+\b", line):
            yield f"{line}: expected --locked and a version"


def wrong_in_requirements(requirements):
    for line in requirements.splitlines():
        if not line.startswith("#") and not re.fullmatch(r"[a-z0-9-]+==[0-9.]+( --hash=sha256:[0-9a-f]{64})+", line):
            yield f"{line}: expected a version and a hash"


def wrong_in_package(script):
    for line in re.findall(r"pip\"? install .*", script.replace("\\\n", " ")):
        if not all(word in line for word in ("--require-hashes", "--no-deps", "--only-binary :all:")):
            yield f"{line}: expected pip to check hashes"


SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def has_sshd():
    return bool(shutil.which("sshd", path=SBIN) and shutil.which("setpriv"))


# Slurm's programs: ranks write down what they see. The command line of each process is readable for every user.
SRUN = """#!/bin/bash
case $* in *--mpi=list*) echo none; exit ;; esac
echo "${DDP_JOB_SECRET-}" >>"$SEEN/secrets"
echo "$@" >>"$SEEN/words"
"""
SCONTROL = """#!/bin/bash
printf '%s\\n' n1 n2
echo "$@" >>"$SEEN/words"
"""


def wrong_in_batch(script):
    """The secret of two jobs as ranks see it, once with agents; and one that the user gives."""
    with tempfile.TemporaryDirectory() as folder:
        for name, contents in (("srun", SRUN), ("scontrol", SCONTROL), ("train.sbatch", script)):
            with open(f"{folder}/{name}", "w", encoding="utf-8") as file:
                file.write(contents)
            os.chmod(f"{folder}/{name}", 0o755)
        job = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SEEN": folder, "SLURM_JOB_ID": "7", "DDP_OUT": f"{folder}/run", "DDP_TRAIN": "true"}
        job.pop("DDP_JOB_SECRET", None)
        given = "given by the user"
        for more in ({}, {"TRAIN_MIN_RANKS": "2"}, {"DDP_JOB_SECRET": given}):
            subprocess.run([f"{folder}/train.sbatch"], env={**job, **more}, cwd=folder, check=True)
        secrets, words = text(f"{folder}/secrets").splitlines(), text(f"{folder}/words")
    if len(secrets) != 3 or not all(re.fullmatch("[0-9a-f]{64}", it) for it in secrets[:2]) or secrets[0] == secrets[1]:
        yield f"expected a random secret for each job, got {secrets}"
    if secrets[-1:] != [given]:
        yield f"expected the user's secret, got {secrets[-1:]}"
    if any(secret and secret in words for secret in secrets):
        yield "the secret is on a command line"


def wrong_in_host_keys(config):
    """Of two ssh servers, started as in a container, one has another key than the job."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        os.mkdir(f"{folder}/.ssh")
        for name in (".ssh/id_rsa", "other"):
            # Of the type that the MPI operator makes.
            subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", f"{folder}/{name}"], check=True)
        with open(f"{folder}/config", "w", encoding="utf-8") as file:
            file.write(config.replace("%d/", f"{folder}/"))
        # As root it would need a folder outside.
        user = ["setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups"] if os.getuid() == 0 else []
        if user:
            subprocess.run(["chown", "-R", "1000:1000", f"{folder}/.ssh", f"{folder}/other"], check=True)
        said = {}
        for name in (".ssh/id_rsa", "other"):
            server = [*user, shutil.which("sshd", path=SBIN), "-i", "-f", os.path.abspath("docker/sshd_config"), "-o", f"HostKey={folder}/{name}"]
            words = ["ssh", "-F", f"{folder}/config", "-o", "BatchMode=yes", "-i", "/dev/null", "-o", f"ProxyCommand={' '.join(server)}", "ddp@node7", "true"]
            said[name] = subprocess.run(words, capture_output=True, text=True, check=False).stderr
    if "Host key verification failed" in said[".ssh/id_rsa"] or "Permission denied" not in said[".ssh/id_rsa"]:
        yield f"a host with the job's key is refused: {said['.ssh/id_rsa']}"
    if "Host key verification failed" not in said["other"]:
        yield f"a host with another key is accepted: {said['other']}"


def planted():
    """Mistakes that must be found: who finds it, the file, what is replaced and by what."""
    workflow = ".github/workflows/test.yml"
    yield wrong_in_workflow, workflow, r"(checkout@)\w+", r"\1v4"
    yield wrong_in_workflow, workflow, r"permissions:\n  contents: read\n", ""
    yield wrong_in_workflow, workflow, "contents: read", "contents: write"
    yield wrong_in_workflow, workflow, "    steps:", "    permissions: write-all\n    steps:"
    yield wrong_in_workflow, workflow, " --locked cargo-deny", " cargo-deny"
    yield wrong_in_workflow, workflow, r"(cargo-deny)@[\d.]+", r"\1"
    yield wrong_in_workflow, workflow, "persist-credentials: false", "persist-credentials: true"
    yield wrong_in_requirements, "launch/python/requirements.txt", r"(ziglang.*?) --hash.*", r"\1"
    yield wrong_in_requirements, "launch/python/requirements.txt", "maturin==", "maturin>="
    yield wrong_in_package, "launch/package", " --require-hashes", ""
    yield wrong_in_package, "launch/package", " --no-deps", ""
    if has_sshd():
        yield wrong_in_host_keys, "docker/ssh_config", "StrictHostKeyChecking yes", "StrictHostKeyChecking no"
        yield wrong_in_host_keys, "docker/ssh_config", "KnownHostsCommand.*", ""
    batch = "launch/slurm/train.sbatch"
    yield wrong_in_batch, batch, "export DDP_JOB_SECRET=", "unused="
    yield wrong_in_batch, batch, r"\$\(od [^)]*\)", "$SLURM_JOB_ID"
    yield wrong_in_batch, batch, r"\$\{DDP_JOB_SECRET:-(.*)\}", r"\1"
    yield wrong_in_batch, batch, "--kill-on-bad-exit=0", '--kill-on-bad-exit=0 --export="ALL,DDP_JOB_SECRET=$DDP_JOB_SECRET"'


def main():
    failed, count = [], 0
    places = {
        wrong_in_workflow: sorted(glob.glob(".github/workflows/*")),
        wrong_in_requirements: ["launch/python/requirements.txt"],
        wrong_in_package: ["launch/package"],
        wrong_in_batch: ["launch/slurm/train.sbatch"],
    }
    if has_sshd():
        places[wrong_in_host_keys] = ["docker/ssh_config"]
    else:
        print("    skipped: keys of hosts: no sshd (SETUP_FOR=launching launch/setup installs it)")
    for finds, paths in places.items():
        for path in paths:
            print(f"    {path}")
            failed += [f"{path}: {mistake}" for mistake in finds(text(path))]
    # Mistakes are planted in files that are right.
    for finds, path, old, new in [] if failed else planted():
        changed, count = re.sub(old, new, text(path)), count + 1
        if changed == text(path):
            failed.append(f"{path}: the planted mistake changes nothing: {old}")
        elif not list(finds(changed)):
            failed.append(f"{path}: not found: {new or 'without ' + old}")
    for mistake in failed:
        print(f"    FAILED: {mistake}", file=sys.stderr)
    print(f"    {count} planted mistakes are found")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
