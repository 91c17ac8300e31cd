"""Checks launch/kubernetes/*.yaml; started by tests/launch/kubernetes. What a worker does before it stops is run, on stand-ins for ranks.

The schema knows the fields that our files use, and of the objects around them all that Kubernetes 1.31 and the MPI operator's v2beta1 have beside
them, as far as it is easily mistyped there: a field it does not know is a mistake, as it is for `kubectl apply --validate=strict`. It is
written down here from the documentation of both; a cluster has the last word.
"""

import copy
import os
import re
import subprocess
import sys
import tempfile

import jsonschema
import yaml

# ---- the schema ----

TEXT = {"type": "string", "minLength": 1}
FLAG = {"type": "boolean"}
COUNT = {"type": "integer", "minimum": 0}
POSITIVE = {"type": "integer", "minimum": 1}
QUANTITY = {"type": ["string", "integer"], "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"}


def one_of(*values):
    return {"enum": list(values)}


def many(items):
    return {"type": "array", "items": items, "minItems": 1}


def named(values):
    return {"type": "object", "additionalProperties": values}


def thing(required=(), **fields):
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
PROBE = thing(
    tcpSocket=thing(["port"], port=PORT), initialDelaySeconds=COUNT, periodSeconds=POSITIVE, timeoutSeconds=POSITIVE,
    successThreshold=POSITIVE, failureThreshold=POSITIVE,
)
SECURITY = dict(runAsUser=COUNT, runAsGroup=COUNT, runAsNonRoot=FLAG,
                seccompProfile=thing(["type"], type=one_of("RuntimeDefault", "Unconfined", "Localhost"), localhostProfile=TEXT))
HOOK = thing(["exec"], exec=thing(["command"], command=many(TEXT)))
CONTAINER = thing(
    ["name", "image"],
    name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
    image=TEXT,
    imagePullPolicy=one_of("Always", "IfNotPresent", "Never"),
    command=many(TEXT),
    args=many(TEXT),
    workingDir=TEXT,
    env=many(thing(["name", "value"], name={"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}, value={"type": "string"})),
    ports=many(thing(["containerPort"], containerPort=PORT, name={"type": "string", "maxLength": 15}, protocol=one_of("TCP", "UDP"))),
    resources=thing(requests=named(QUANTITY), limits=named(QUANTITY)),
    volumeMounts=many(thing(["name", "mountPath"], name=TEXT, mountPath={"type": "string", "pattern": "^/"}, readOnly=FLAG, subPath=TEXT)),
    securityContext=thing(
        **SECURITY, allowPrivilegeEscalation=FLAG, privileged=FLAG, readOnlyRootFilesystem=FLAG,
        capabilities=thing(add=many(TEXT), drop=many(TEXT)),
    ),
    readinessProbe=PROBE,
    livenessProbe=PROBE,
    startupProbe=PROBE,
    lifecycle=thing(postStart=HOOK, preStop=HOOK),
)
VOLUME = thing(
    ["name"],
    name=TEXT,
    emptyDir=thing(medium=one_of("", "Memory"), sizeLimit=QUANTITY),
    persistentVolumeClaim=thing(["claimName"], claimName=TEXT, readOnly=FLAG),
)
METADATA = thing(name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}, namespace=TEXT, labels=named({"type": "string"}),
                 annotations=named({"type": "string"}))
POD_FIELDS = dict(
    containers=many(CONTAINER), initContainers=many(CONTAINER), volumes=many(VOLUME), restartPolicy=one_of("Always", "OnFailure", "Never"),
    terminationGracePeriodSeconds=COUNT, securityContext=thing(**SECURITY, fsGroup=COUNT), nodeSelector=named(TEXT), tolerations=many(named({})),
    affinity=named({}), serviceAccountName=TEXT, automountServiceAccountToken=FLAG, priorityClassName=TEXT, schedulerName=TEXT, imagePullSecrets=many(thing(["name"], name=TEXT)),
)
TEMPLATE = thing(["spec"], metadata=METADATA, spec=thing(["containers"], **POD_FIELDS))

REPLICAS = thing(["template"], replicas=POSITIVE, restartPolicy=one_of("Never", "OnFailure"), template=TEMPLATE)
MPI_JOB = thing(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion=one_of("kubeflow.org/v2beta1"),
    kind=one_of("MPIJob"),
    metadata=METADATA,
    spec=thing(
        ["mpiReplicaSpecs"],
        slotsPerWorker=POSITIVE,
        runLauncherAsWorker=FLAG,
        sshAuthMountPath=TEXT,
        mpiImplementation=one_of("OpenMPI", "Intel", "MPICH"),
        launcherCreationPolicy=one_of("AtStartup", "WaitForWorkersReady"),
        runPolicy=thing(
            cleanPodPolicy=one_of("None", "Running", "All"), ttlSecondsAfterFinished=COUNT, activeDeadlineSeconds=POSITIVE, backoffLimit=COUNT,
            suspend=FLAG, managedBy=TEXT,
            schedulingPolicy=thing(minAvailable=POSITIVE, queue=TEXT, minResources=named(QUANTITY), priorityClass=TEXT, scheduleTimeoutSeconds=COUNT),
        ),
        mpiReplicaSpecs=thing(["Launcher"], Launcher=REPLICAS, Worker=REPLICAS),
    ),
)
RULE = thing(
    ["action"],
    action=one_of("FailJob", "FailIndex", "Ignore", "Count"),
    onExitCodes=thing(["operator", "values"], containerName=TEXT, operator=one_of("In", "NotIn"),
                      values={"type": "array", "items": COUNT, "minItems": 1, "maxItems": 255, "uniqueItems": True}),
    onPodConditions=many(thing(["type"], type=TEXT, status=one_of("True", "False", "Unknown"))),
)
JOB = thing(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion=one_of("batch/v1"),
    kind=one_of("Job"),
    metadata=METADATA,
    spec=thing(["template"], template=TEMPLATE, backoffLimit=COUNT, ttlSecondsAfterFinished=COUNT, activeDeadlineSeconds=POSITIVE,
               completions=POSITIVE, parallelism=COUNT, suspend=FLAG, podFailurePolicy=thing(["rules"], rules=many(RULE))),
)
SELECTOR = thing(["matchLabels"], matchLabels=named(TEXT))
POLICY = thing(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion=one_of("networking.k8s.io/v1"),
    kind=one_of("NetworkPolicy"),
    metadata=METADATA,
    spec=thing(["podSelector"], podSelector=SELECTOR, policyTypes=many(one_of("Ingress", "Egress")),
               ingress=many(thing(**{"from": many(thing(podSelector=SELECTOR, namespaceSelector=SELECTOR))}))),
)


class Loader(yaml.SafeLoader):
    """YAML in which the same key twice is an error, as it is for Kubernetes."""


def mapping(loader, node):
    keys = [loader.construct_object(key) for key, _ in node.value]
    twice = {key for key in keys if keys.count(key) > 1}
    if twice:
        raise yaml.YAMLError(f"{node.start_mark}: twice: {', '.join(twice)}")
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)


def mistakes(document, schema):
    found = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in found]


# ---- what belongs together ----


def text(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def find(pattern, path):
    found = re.search(pattern, text(path), re.MULTILINE)
    assert found, f"{path} has nothing like {pattern}"
    return found.group(1)


def option(command, name, default=None):
    return command[command.index(name) + 1] if name in command[:-1] else default


def wrong_in_pod(what, pod):
    """What of a pod's volumes, resources and users does not belong together."""
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    for container in pod["containers"]:
        where = f"{what}, container {container['name']}"
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"{where}: {mount['mountPath']} is mounted from no volume: {mount['name']}"
        user = container.get("securityContext", {}).get("runAsUser")
        if str(user) != find(r"useradd .*--uid (\d+)", "docker/Dockerfile.cuda"):
            yield f"{where}: runs as {user}, the image's user is another"
        if ":latest" in container["image"] or ":" not in container["image"]:
            yield f"{where}: the image {container['image']} has no version"
        limits = container.get("resources", {}).get("limits", {})
        if "nvidia.com/gpu" in limits:
            shared = [mount for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
            if not shared or volumes.get(shared[0]["name"], {}).get("emptyDir", {}).get("medium") != "Memory":
                yield f"{where}: /dev/shm is not memory of the pod's own: NCCL needs more than 64 MiB"
        command = container.get("command", [])
        if command and command[0] == "ddp-train":
            grace = int(option(command, "--grace-s", 60))
            if pod.get("terminationGracePeriodSeconds", 30) < grace + 15:
                yield f"{where}: the pod is killed before its ranks' {grace} s to save are over"
            if "--resume=auto" not in container.get("args", []):
                yield f"{where}: started again, it would not resume"
            flags = text("ddp/src/flags.rs")
            unknown = [word for word in command if word.startswith("--") and f"pub {word[2:].replace('-', '_')}:" not in flags]
            if unknown:
                yield f"{where}: ddp-train starts no ranks with {', '.join(unknown)}"


def not_restricted(what, pod):
    """What a namespace that enforces Kubernetes' pod security standard "restricted" would refuse, and a token that nobody needs.

    Other fields that it limits, as hostNetwork, hostPath and procMount, the schema does not know.
    """
    if pod.get("automountServiceAccountToken") is not False:
        yield f"{what}: it has a token for Kubernetes' API"
    for container in pod["containers"] + pod.get("initContainers", []):
        where, security = f"{what}, container {container['name']}", container.get("securityContext", {})
        whole = {**pod.get("securityContext", {}), **security}
        if whole.get("runAsNonRoot") is not True:
            yield f"{where}: runAsNonRoot is not true"
        if whole.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"{where}: seccompProfile is not RuntimeDefault"
        if security.get("allowPrivilegeEscalation") is not False:
            yield f"{where}: allowPrivilegeEscalation is not false"
        if security.get("capabilities", {}).get("drop") != ["ALL"] or security["capabilities"].get("add"):
            yield f"{where}: it has capabilities"
        if security.get("privileged"):
            yield f"{where}: it is privileged"


def wrong_in_policy(policy, templates):
    """Who else may connect to these pods."""
    selected = policy["spec"]["podSelector"]["matchLabels"]
    for template in templates:
        if not selected.items() <= template.get("metadata", {}).get("labels", {}).items():
            yield "the NetworkPolicy is not about all pods of the job"
    if "Ingress" not in policy["spec"].get("policyTypes", []):
        yield "the NetworkPolicy does not limit who connects"
    wanted = [{"from": [{"podSelector": policy["spec"]["podSelector"]}]}] if len(templates) > 1 else []
    if policy["spec"].get("ingress", []) != wanted:
        yield f"the NetworkPolicy admits others: {policy['spec'].get('ingress')}"


def wrong_in_mpi_job(job):
    yield from wrong_in_roles(job)
    for kind, role in job["spec"]["mpiReplicaSpecs"].items():
        yield from not_restricted(kind, role["template"]["spec"])


def wrong_in_roles(job):
    spec = job["spec"]
    launcher, worker = (spec["mpiReplicaSpecs"][kind]["template"]["spec"] for kind in ("Launcher", "Worker"))
    yield from wrong_in_pod("Launcher", launcher)
    yield from wrong_in_pod("Worker", worker)
    gpus = worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    if gpus != spec["slotsPerWorker"]:
        yield f"slotsPerWorker is {spec['slotsPerWorker']}, and a worker has {gpus} GPUs"
    home = find(r"-d -o ddp -g ddp -m 700 (\S+)", "docker/Dockerfile.cuda")
    if spec["sshAuthMountPath"] != home:
        yield f"keys are mounted at {spec['sshAuthMountPath']}, and the image looks in {home}"
    if find(r"^HostKey (\S+)", "docker/sshd_config") != f"{home}/id_rsa":
        yield "the ssh server's key is not the one that the operator mounts"
    port = find(r"^Port (\d+)", "docker/sshd_config")
    container = worker["containers"][0]
    ports = {port, find(r"^ *Port (\d+)", "docker/ssh_config"), str(container["ports"][0]["containerPort"]),
             str(container["readinessProbe"]["tcpSocket"]["port"])}
    if len(ports) > 1:
        yield f"the ssh server's port is not the same everywhere: {', '.join(sorted(ports))}"
    config = option(container["command"], "-f")
    if find(r"^COPY docker/sshd_config (\S+)", "docker/Dockerfile.cuda") != config:
        yield f"the image has no {config}"
    if launcher["containers"][0]["image"] != container["image"]:
        yield "launcher and workers have different images"
    yield from wrong_in_ending(spec, launcher, worker)
    if spec.get("launcherCreationPolicy") != "WaitForWorkersReady":
        yield "the launcher may come before its workers"
    if option(launcher["containers"][0]["command"], "--hostfile") != "/etc/mpi/hostfile":
        yield "the launcher does not read the operator's host file"


def wrong_in_ending(spec, launcher, worker):
    """What of a worker's end would cost the work since the last checkpoint, or the worker."""
    if spec["mpiReplicaSpecs"]["Worker"].get("restartPolicy") != "OnFailure":
        yield "a worker whose ssh server has ended would never come back"
    hook = stop_hook(worker)
    if "kill -USR1" not in hook:
        yield "a worker that is told to end does not ask its ranks to save"
        return
    program = launcher["containers"][0]["command"][0]
    if f"'({program})'" not in hook:
        yield f"a worker that is told to end does not look for {program}"
    waits = int(re.search(r"second < (\d+)", hook).group(1))
    grace = worker.get("terminationGracePeriodSeconds", 30)
    if not int(option(launcher["containers"][0]["command"], "--grace-s", 60)) <= waits <= grace - 5:
        yield f"a worker waits {waits} s for its ranks, and is killed after {grace}"


def wrong_with_rdma(job):
    """What is wrong of the file with its lines for RDMA."""
    yield from mistakes(job, MPI_JOB) or wrong_in_roles(job)
    launcher, worker = (job["spec"]["mpiReplicaSpecs"][kind]["template"]["spec"]["containers"][0] for kind in ("Launcher", "Worker"))
    if not any(name.startswith("rdma/") for name in worker["resources"]["limits"]):
        yield "workers do not ask for /dev/infiniband"
    if worker["securityContext"]["capabilities"].get("add") != ["IPC_LOCK"]:
        yield "workers have not IPC_LOCK"
    if "NCCL_IB_GID_INDEX" not in [variable["name"] for variable in launcher.get("env", [])]:
        yield "the launcher does not pass on NCCL_IB_GID_INDEX"


def stop_hook(pod):
    command = pod["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    return command[2] if command[:2] == ["bash", "-c"] else ""


def wrong_in_job(job):
    pod = job["spec"]["template"]["spec"]
    yield from wrong_in_pod("Job", pod)
    yield from not_restricted("Job", pod)
    container = pod["containers"][0]
    ranks, gpus = option(container["command"], "--ranks"), container["resources"]["limits"]["nvidia.com/gpu"]
    if ranks != str(gpus):
        yield f"{ranks} ranks on {gpus} GPUs"
    if pod["restartPolicy"] != "Never":
        yield "podFailurePolicy needs restartPolicy: Never"
    rules = job["spec"]["podFailurePolicy"]["rules"]
    codes = {rule["action"]: set(rule["onExitCodes"]["values"]) for rule in rules if "onExitCodes" in rule}
    if codes != {"FailJob": {2, 65, 70, 76, 78}, "Ignore": {75}}:
        yield f"exit codes are not those of ddp-train: {codes}"
    names = {rule["onExitCodes"].get("containerName") for rule in rules if "onExitCodes" in rule}
    if names != {container["name"]}:
        yield f"exit codes are those of {names}, and the container is {container['name']}"


# ---- and that this finds mistakes ----


def changed(document, *path_and_value):
    *path, last, value = path_and_value
    document = copy.deepcopy(document)
    place = document
    for key in path:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return document


def planted(policy, mpi_job, job):
    """Mistakes that must be found: a name, the document, who finds it."""
    worker = ("spec", "mpiReplicaSpecs", "Worker", "template", "spec")
    launcher = ("spec", "mpiReplicaSpecs", "Launcher", "template", "spec")
    both = lambda document: mistakes(document, MPI_JOB) or list(wrong_in_mpi_job(document))
    alone = lambda document: mistakes(document, JOB) or list(wrong_in_job(document))
    yield "a misspelt field", changed(mpi_job, "spec", "slotPerWorker", 4), both
    yield "another version", changed(mpi_job, "apiVersion", "kubeflow.org/v1"), both
    yield "an unknown policy", changed(mpi_job, "spec", "runPolicy", "cleanPodPolicy", "Done"), both
    yield "a number as text", changed(mpi_job, "spec", "slotsPerWorker", "4"), both
    yield "more slots than GPUs", changed(mpi_job, "spec", "slotsPerWorker", 8), both
    yield "small shared memory", changed(mpi_job, *worker, "volumes", 0, "emptyDir", {}), both
    yield "an unknown volume", changed(mpi_job, *worker, "containers", 0, "volumeMounts", 0, "name", "other"), both
    yield "another user", changed(mpi_job, *worker, "containers", 0, "securityContext", "runAsUser", 0), both
    yield "another port", changed(mpi_job, *worker, "containers", 0, "readinessProbe", "tcpSocket", "port", 22), both
    yield "keys elsewhere", changed(mpi_job, "spec", "sshAuthMountPath", "/root/.ssh"), both
    yield "a short end", changed(mpi_job, *launcher, "terminationGracePeriodSeconds", 30), both
    yield "an unknown option", changed(mpi_job, *launcher, "containers", 0, "command", 3, "--grace"), both
    yield "no resuming", changed(mpi_job, *launcher, "containers", 0, "args", 2, "--zero=1"), both
    yield "a worker that stays away", changed(mpi_job, "spec", "mpiReplicaSpecs", "Worker", "restartPolicy", "Never"), both
    yield "ranks that nobody asks to save", changed(mpi_job, *worker, "containers", 0, "lifecycle", None), both
    yield "a hook without a command", changed(mpi_job, *worker, "containers", 0, "lifecycle", "preStop", "exec", {}), both
    yield "a worker killed as its ranks save", changed(mpi_job, *worker, "terminationGracePeriodSeconds", 60), both
    yield "ranks of another name", changed(mpi_job, *launcher, "containers", 0, "command", 0, "my-train"), both
    yield "an image without a version", changed(job, "spec", "template", "spec", "containers", 0, "image", "ddp-train"), alone
    yield "ranks without GPUs", changed(job, "spec", "template", "spec", "containers", 0, "command", 2, "8"), alone
    yield "a pod that starts again by itself", changed(job, "spec", "template", "spec", "restartPolicy", "OnFailure"), alone
    yield "75 counted", changed(job, "spec", "podFailurePolicy", "rules", 1, "onExitCodes", "values", [76]), alone
    yield "no template", changed(job, "spec", "template", None), alone
    pod = ("spec", "template", "spec")
    security = (*pod, "containers", 0, "securityContext")
    yield "root", changed(job, *security, "runAsNonRoot", None), alone
    yield "every system call", changed(job, *security, "seccompProfile", "type", "Unconfined"), alone
    yield "no filter of system calls", changed(job, *security, "seccompProfile", None), alone
    yield "setuid programs", changed(job, *security, "allowPrivilegeEscalation", None), alone
    yield "capabilities", changed(job, *security, "capabilities", "drop", ["NET_RAW"]), alone
    yield "a capability", changed(mpi_job, *worker, "containers", 0, "securityContext", "capabilities", "add", ["IPC_LOCK"]), both
    yield "a privileged container", changed(job, *security, "privileged", True), alone
    yield "a token", changed(mpi_job, *launcher, "automountServiceAccountToken", None), both
    yield "the host's network", changed(job, *pod, "hostNetwork", True), alone
    templates = [role["template"] for role in mpi_job["spec"]["mpiReplicaSpecs"].values()]
    among = lambda document: mistakes(document, POLICY) or list(wrong_in_policy(document, templates))
    yield "a policy of other pods", changed(policy, "spec", "podSelector", "matchLabels", "app.kubernetes.io/instance", "other"), among
    yield "a policy that admits all", changed(policy, "spec", "ingress", 0, "from", None), among
    yield "a policy that admits a namespace", changed(policy, "spec", "ingress", 0, "from", 0, "podSelector", None), among
    yield "a policy of what goes out", changed(policy, "spec", "policyTypes", ["Egress"]), among
    yield "a policy that admits someone to a lonely pod", policy, lambda document: list(wrong_in_policy(document, [job["spec"]["template"]]))


# ---- what a worker does before it stops ----

# In a separate /proc: two ranks, one of which is slow to save, and an unrelated process.
SCENE = """
cd "$1"
cat >ddp-train <<'RANK'
#!/bin/bash
trap 'read -rt "$1" -u 3; echo saved >>"notes-$$"; exit 75' USR1
mkfifo "pipe-$$"
exec 3<>"pipe-$$"
echo ready >"notes-$$"
# Without processes of its own, which would have its name for a moment and get the signal, too.
while :; do read -rt 0.1 -u 3; done
RANK
sed 's/^trap.*/trap "echo disturbed >>bystander" USR1/' ddp-train >ddp-trainer
chmod +x ddp-train ddp-trainer
./ddp-train 0 &
./ddp-train 2.5 &
./ddp-trainer &
while [ "$(cat notes-* 2>/dev/null | grep -c ready)" != 3 ]; do sleep 0.1; done
"${@:2}" || echo "it ends with $?"
echo "at its end $(cat notes-* | grep -c saved) have saved"
cat bystander 2>/dev/null
printf '#!/bin/bash\necho without ranks it waits >>slept\n' >sleep
chmod +x sleep
PATH=$1:$PATH "${@:2}" || echo "without ranks it ends with $?"
cat slept 2>/dev/null
"""


def ranks_save_before_a_worker_stops(job):
    """The very command of the file. None where it cannot be tried, else what was wrong."""
    pod = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    alone = ["unshare", *([] if os.getuid() == 0 else ["--user", "--map-root-user"]), "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        return None
    with tempfile.TemporaryDirectory() as folder:
        # /bin/bash by name, else stand-ins would be called "bash".
        done = subprocess.run([*alone, "/bin/bash", "-c", SCENE, "scene", folder, *command], capture_output=True, text=True, timeout=60, check=False)
    said = (done.stdout + done.stderr).strip()
    return "" if said == "at its end 2 have saved" else said or "nothing was said"


def wrong_in_secret():
    """docs/elastic.md: the secret that the command makes is the one that the pods read, and it is in no file."""
    page = text("docs/elastic.md")
    made = re.search(r"^openssl rand -hex 32 \| tr -d '\\n' \| kubectl create secret generic (\S+) --from-file=(\w+)=/dev/stdin$", page, re.MULTILINE)
    read = re.search(r"name: DDP_JOB_SECRET\n +valueFrom: \{secretKeyRef: \{name: (\S+), key: (\w+)\}\}", page)
    if not made or not read or made.groups() != read.groups():
        yield f"the secret is made as {made and made.groups()}, and read as {read and read.groups()}"


def main():
    documents = []
    failed = False
    for path, schema, rules in [("launch/kubernetes/mpijob.yaml", MPI_JOB, wrong_in_mpi_job), ("launch/kubernetes/pod.yaml", JOB, wrong_in_job)]:
        policy, job = yaml.load_all(text(path), Loader)
        templates = [it["template"] for it in job["spec"].get("mpiReplicaSpecs", {"Job": job["spec"]}).values()]
        documents += [policy, job]
        found = mistakes(policy, POLICY) or mistakes(job, schema) or [*wrong_in_policy(policy, templates), *rules(job)]
        for mistake in found:
            print(f"    FAILED: {path}: {mistake}", file=sys.stderr)
        failed = failed or bool(found)
        print(f"    {path}")
    for mistake in wrong_in_secret():
        print(f"    FAILED: docs/elastic.md: {mistake}", file=sys.stderr)
        failed = True
    if failed:
        return 1
    policy, mpi_job, _, job = documents
    of_rdma = re.sub("#rdma ", "", text("launch/kubernetes/mpijob.yaml"))
    for mistake in wrong_with_rdma(list(yaml.load_all(of_rdma, Loader))[1]):
        print(f"    FAILED: launch/kubernetes/mpijob.yaml with its lines for RDMA: {mistake}", file=sys.stderr)
        failed = True
    if failed:
        return 1
    wrong = ranks_save_before_a_worker_stops(mpi_job)
    if wrong:
        print(f"    FAILED: before a worker stops its ranks save: {wrong}", file=sys.stderr)
        failed = True
    elif wrong is None:
        print("    skipped: what a worker does before it stops: this machine lets nobody make namespaces")
    else:
        print("    before a worker stops its ranks save")
    count = 0
    for name, document, finds in planted(policy, mpi_job, job):
        found = finds(document)
        count += 1
        if not found:
            print(f"    FAILED: not found: {name}", file=sys.stderr)
            failed = True
    print(f"    {count} planted mistakes are found")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
