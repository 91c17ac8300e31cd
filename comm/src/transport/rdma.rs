//! Network cards that move memory between hosts without the CPU (InfiniBand, RoCE, EFA), and what
//! keeps a process from using them. Linux lists them in /sys/class/infiniband.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::path::Path;

use crate::launcher::Lookup;

/// NCCL registers its buffers with the card, which locks them in memory. A lower limit makes that
/// fail.
const LOCKED_BYTES_MIN: u64 = 1 << 30;
/// The bit of a capability set that lifts this limit.
const CAP_IPC_LOCK: u64 = 1 << 14;
const GID_INDEX: &str = "NCCL_IB_GID_INDEX";

/// What a host has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rdma {
    /// Ports with a link: `mlx5_0 (400 Gb/sec (4X NDR), InfiniBand)`. RoCE runs over Ethernet:
    /// `mlx5_0 (100 Gb/sec (4X EDR), Ethernet, RoCE v2 at GID index 1, 3)`.
    ports: Vec<String>,
    /// Why this process cannot use them, and the fix.
    problem: Option<[String; 2]>,
}

impl Rdma {
    /// What this host has; None without a port that has a link.
    pub fn of_this_host() -> Option<Rdma> {
        let lookup = |name: &str| std::env::var(name).ok();
        let files = ["/proc/self/limits", "/proc/self/status"];
        let process = files.map(|file| fs::read_to_string(file).unwrap_or_default());
        Rdma::find(Path::new("/"), &process.concat(), &lookup)
    }

    /// `process` has what Linux says of this process: its limits and its status.
    fn find(root: &Path, process: &str, lookup: Lookup<'_>) -> Option<Rdma> {
        let mut ports: Vec<String> = Vec::new();
        let mut problem = problem(root, process, lookup);
        for card in fs::read_dir(root.join("sys/class/infiniband")).ok()? {
            let card = card.ok()?;
            let of_card = fs::read_dir(card.path().join("ports"))
                .into_iter()
                .flatten();
            for port in of_card.flatten() {
                let read = |name: &str| fs::read_to_string(port.path().join(name)).ok();
                let of = |name| read(name).unwrap_or_default().trim().to_string();
                // "4: ACTIVE"
                if of("state").starts_with('4') {
                    let name = card.file_name().to_string_lossy().into_owned();
                    let mut text = format!("{name} ({}, {}", of("rate"), of("link_layer"));
                    let indices = roce_v2(&port.path());
                    if !indices.is_empty() {
                        text += &format!(", RoCE v2 at GID index {}", indices.join(", "));
                        problem = problem.or_else(|| wrong_index(&name, &indices, lookup));
                    }
                    ports.push(text + ")");
                }
            }
        }
        ports.sort();
        (!ports.is_empty()).then_some(Rdma { ports, problem })
    }

    /// Why this process cannot use them, and the fix.
    pub fn problem(&self) -> Option<&[String; 2]> {
        self.problem.as_ref()
    }
}

impl fmt::Display for Rdma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.ports.join(", "))
    }
}

/// At which indices a port has an address (GID) of RoCE v2: none over InfiniBand.
fn roce_v2(port: &Path) -> Vec<String> {
    let types = fs::read_dir(port.join("gid_attrs/types"));
    let types = types.into_iter().flatten().flatten();
    // Those without an address cannot be read.
    let is_v2 = |it: &fs::DirEntry| fs::read_to_string(it.path()).is_ok_and(|of| of == "RoCE v2\n");
    let names = types.filter(is_v2).map(|it| it.file_name());
    let mut indices: Vec<u32> = names.filter_map(|it| it.to_str()?.parse().ok()).collect();
    indices.sort();
    indices.iter().map(u32::to_string).collect()
}

/// If NCCL is told to take another address than those `indices`: v1, which routers do not pass on,
/// or none. Told nothing, it takes one of them itself from 2.21 on.
fn wrong_index(card: &str, indices: &[String], lookup: Lookup<'_>) -> Option<[String; 2]> {
    let index = lookup(GID_INDEX).filter(|it| !it.starts_with('-') && !indices.contains(it))?;
    let why = format!("{GID_INDEX}={index} is no address of RoCE v2 of {card}");
    let help = format!("set it to {}, or unset it", indices.last()?);
    Some([why, help + " for NCCL 2.21 or later"])
}

fn problem(root: &Path, process: &str, lookup: Lookup<'_>) -> Option<[String; 2]> {
    let is_set = |name: &&str| lookup(name).is_some_and(|value| value != "0");
    if let Some(name) = Some("NCCL_IB_DISABLE").filter(is_set) {
        return Some([format!("{name} is set"), format!("unset {name}")]);
    }
    let cards = root.join("dev/infiniband");
    let verbs = || fs::read_dir(&cards).into_iter().flatten().flatten();
    let mut verbs = verbs().filter(|it| it.file_name().as_encoded_bytes().starts_with(b"uverbs"));
    let Some(first) = verbs.next() else {
        let help = "give the container that device; in Kubernetes, ask for the RDMA device plugin's \
                    resource";
        return Some(["/dev/infiniband is not there".into(), help.into()]);
    };
    if let Err(error) = OpenOptions::new().read(true).write(true).open(first.path()) {
        let help = "let this user read and write the devices there";
        return Some([format!("{}: {error}", first.path().display()), help.into()]);
    }
    let of = |name: &str| process.lines().find_map(|it| it.strip_prefix(name));
    let bytes = of("Max locked memory")?.split_whitespace().next()?;
    let bytes = bytes.parse::<u64>().ok()?;
    let capabilities = of("CapEff:").and_then(|it| u64::from_str_radix(it.trim(), 16).ok());
    let is_limited = capabilities.unwrap_or(0) & CAP_IPC_LOCK == 0;
    (bytes < LOCKED_BYTES_MIN && is_limited).then(|| {
        let why = format!("it may lock {bytes} bytes of memory only, without CAP_IPC_LOCK");
        let help = "ulimit -l unlimited, LimitMEMLOCK=infinity for sshd, slurmd and containerd, or \
                    the capability IPC_LOCK of a container whose ranks run as root";
        [why, help.into()]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNLIMITED: &str =
        "Max locked memory         unlimited            unlimited            bytes\n";

    fn host(name: &str, state: &str) -> std::path::PathBuf {
        let root = std::env::temp_dir().join(format!("ddp-rdma-{name}-{}", std::process::id()));
        let port = root.join("sys/class/infiniband/mlx5_0/ports/1");
        fs::create_dir_all(&port).unwrap();
        for (file, text) in [
            ("state", state),
            ("rate", "400 Gb/sec (4X NDR)"),
            ("link_layer", "InfiniBand"),
        ] {
            fs::write(port.join(file), format!("{text}\n")).unwrap();
        }
        root
    }

    #[test]
    fn what_is_missing_is_found_in_order() {
        let root = host("order", "4: ACTIVE");
        let none = |_: &str| None;
        let found = |limits: &str, lookup: Lookup<'_>| {
            let rdma = Rdma::find(&root, limits, lookup).unwrap();
            assert_eq!(rdma.to_string(), "mlx5_0 (400 Gb/sec (4X NDR), InfiniBand)");
            rdma.problem.map(|[problem, _]| problem)
        };
        let disabled = |name: &str| (name == "NCCL_IB_DISABLE").then(|| "1".to_string());
        assert_eq!(
            found(UNLIMITED, &disabled).unwrap(),
            "NCCL_IB_DISABLE is set"
        );
        assert_eq!(
            found(UNLIMITED, &none).unwrap(),
            "/dev/infiniband is not there"
        );
        fs::create_dir_all(root.join("dev/infiniband")).unwrap();
        fs::write(root.join("dev/infiniband/uverbs0"), "").unwrap();
        let few = UNLIMITED.replacen("unlimited", "65536", 1);
        assert_eq!(
            found(&few, &none).unwrap(),
            "it may lock 65536 bytes of memory only, without CAP_IPC_LOCK"
        );
        let capable = |set: &str| found(&format!("{few}CapEff:\t{set}\n"), &none);
        assert_eq!(capable("00000000a80465fb"), None);
        assert!(capable("0000000000000000").is_some());
        assert_eq!(found(UNLIMITED, &none), None);
        let on = |name: &str| (name == "NCCL_IB_DISABLE").then(|| "0".to_string());
        assert_eq!(found(UNLIMITED, &on), None);
        fs::remove_dir_all(root).unwrap();
    }

    /// Addresses as those of a ConnectX card: each in both versions. There is none at 4, so that
    /// type cannot be read.
    #[test]
    fn an_index_of_another_address_than_one_of_roce_v2_is_named() {
        let root = host("roce", "4: ACTIVE");
        fs::create_dir_all(root.join("dev/infiniband")).unwrap();
        fs::write(root.join("dev/infiniband/uverbs0"), "").unwrap();
        let types = root.join("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types");
        fs::create_dir_all(types.join("4")).unwrap();
        for (index, of) in ["IB/RoCE v1", "RoCE v2"].repeat(2).iter().enumerate() {
            fs::write(types.join(index.to_string()), format!("{of}\n")).unwrap();
        }
        let problem = |index: Option<&str>| {
            let index = index.map(str::to_string);
            let lookup = |name: &str| index.clone().filter(|_| name == GID_INDEX);
            let rdma = Rdma::find(&root, UNLIMITED, &lookup).unwrap();
            let text = rdma.to_string();
            assert!(text.ends_with(", RoCE v2 at GID index 1, 3)"), "{text}");
            rdma.problem
        };
        for fine in [None, Some("1"), Some("3"), Some("-1")] {
            assert_eq!(problem(fine), None);
        }
        for wrong in ["0", "4", "three"] {
            let [why, help] = problem(Some(wrong)).unwrap();
            let of_card = "is no address of RoCE v2 of mlx5_0";
            assert_eq!(why, format!("NCCL_IB_GID_INDEX={wrong} {of_card}"));
            assert_eq!(help, "set it to 3, or unset it for NCCL 2.21 or later");
        }
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_host_without_a_link_has_none() {
        let root = host("down", "1: DOWN");
        assert_eq!(Rdma::find(&root, UNLIMITED, &|_: &str| None), None);
        assert_eq!(
            Rdma::find(&root.join("dev"), UNLIMITED, &|_: &str| None),
            None
        );
        fs::remove_dir_all(root).unwrap();
    }
}
