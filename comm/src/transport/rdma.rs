//! Network cards that move memory between hosts without the CPU (InfiniBand, RoCE, EFA), and what
//! keeps a process from using them. Linux lists them in /sys/class/infiniband.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::path::Path;

use crate::launcher::Lookup;

/// NCCL registers its buffers with the card, which locks them in memory. A lower limit makes that
/// fail.
const LOCKED_BYTES_MIN: u64 = 1 << 30;

/// What a host has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rdma {
    /// Ports with a link: `mlx5_0 (400 Gb/sec (4X NDR), InfiniBand)`.
    ports: Vec<String>,
    /// Why this process cannot use them, and the fix.
    problem: Option<[String; 2]>,
}

impl Rdma {
    /// What this host has; None without a port that has a link.
    pub fn of_this_host() -> Option<Rdma> {
        let lookup = |name: &str| std::env::var(name).ok();
        let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
        Rdma::find(Path::new("/"), &limits, &lookup)
    }

    fn find(root: &Path, limits: &str, lookup: Lookup<'_>) -> Option<Rdma> {
        let mut ports: Vec<String> = Vec::new();
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
                    ports.push(format!("{name} ({}, {})", of("rate"), of("link_layer")));
                }
            }
        }
        ports.sort();
        let problem = problem(root, limits, lookup);
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

fn problem(root: &Path, limits: &str, lookup: Lookup<'_>) -> Option<[String; 2]> {
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
    let locked = limits
        .lines()
        .find_map(|it| it.strip_prefix("Max locked memory"))?;
    let bytes = locked.split_whitespace().next()?.parse::<u64>().ok()?;
    (bytes < LOCKED_BYTES_MIN).then(|| {
        let help = "ulimit -l unlimited, LimitMEMLOCK=infinity for sshd and slurmd, or the \
                    capability IPC_LOCK of a container";
        [
            format!("it may lock {bytes} bytes of memory only"),
            help.into(),
        ]
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
            "it may lock 65536 bytes of memory only"
        );
        assert_eq!(found(UNLIMITED, &none), None);
        let on = |name: &str| (name == "NCCL_IB_DISABLE").then(|| "0".to_string());
        assert_eq!(found(UNLIMITED, &on), None);
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
