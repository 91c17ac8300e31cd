//! What NCCL says of its connections. No function tells, so its log is read: it goes to a file in
//! memory, where the user has not asked for it.

use std::ffi::CStr;
use std::fs::{self, File};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::{Once, OnceLock};

use crate::launcher::Lookup;
use crate::transport::rdma::Rdma;

/// NCCL's settings of its log.
const NAMES: [&str; 3] = ["NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"];

/// Each of them with its value.
type LogPairs = [(&'static str, String); 3];

static LOG: OnceLock<Option<File>> = OnceLock::new();

/// The settings with which NCCL writes the log. None if the user has set any of them, perhaps in
/// NCCL's file in the folder `home` or that for the `system`.
pub(super) fn settings(lookup: Lookup<'_>, home: Option<String>, system: &str) -> Option<LogPairs> {
    if NAMES.iter().any(|name| lookup(name).is_some()) || are_in_files(lookup, home, system) {
        return None;
    }
    let file = LOG.get_or_init(|| {
        // SAFETY: the name is a C string; the call reads nothing else.
        let fd = unsafe { libc::memfd_create(c"ddp-nccl".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: the kernel has just given this descriptor to this call alone.
        (fd >= 0).then(|| File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
    });
    let path = format!("/proc/self/fd/{}", file.as_ref()?.as_raw_fd());
    let [level, parts, to] = NAMES;
    Some([(level, "INFO".into()), (parts, "INIT".into()), (to, path)])
}

/// Whether one of the files in which NCCL looks for settings (src/misc/param.cc) has any of them.
fn are_in_files(lookup: Lookup<'_>, home: Option<String>, system: &str) -> bool {
    let of_home = || Some(format!("{}/.nccl.conf", home?));
    let named = lookup("NCCL_CONF_FILE").filter(|it| !it.is_empty());
    let own = named.or_else(of_home);
    let files = own.into_iter().chain([system.into()]);
    let texts = files.filter_map(|file| fs::read_to_string(file).ok());
    let is_of_log = |line: &str| NAMES.contains(&line.split('=').next().unwrap_or(line).trim());
    texts.into_iter().any(|text| text.lines().any(is_of_log))
}

/// The user's home folder where NCCL looks for it: in the password database, whatever HOME is.
pub(super) fn home() -> Option<String> {
    let (mut entry, mut found, mut texts) = (MaybeUninit::uninit(), null_mut(), [0; 16 << 10]);
    let (place, buffer) = (entry.as_mut_ptr(), texts.as_mut_ptr());
    // SAFETY: all pointers are to local variables, and `buffer` has as many bytes as is said. The
    // call points `found` to `entry`, whose folder is then a string in `texts`, or leaves it null.
    unsafe {
        libc::getpwuid_r(libc::getuid(), place, buffer, texts.len(), &mut found);
        let folder = CStr::from_ptr(found.as_ref()?.pw_dir);
        folder.to_str().ok().map(str::to_string)
    }
}

/// How NCCL's log says that this rank is connected: `P2P/CUMEM`, `SHM/direct`, `NET/IB`, each once.
fn connections(log: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for line in log.lines() {
        // Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
        let Some((_, way)) = line.split_once(" via ") else {
            continue;
        };
        // The name of a network may have spaces: NET/AWS Libfabric/0.
        let ends = [way.match_indices('/').nth(1), way.match_indices(' ').next()];
        let end = ends[0].or(ends[1]).map_or(way.len(), |(at, _)| at);
        if !found.contains(&&way[..end]) {
            found.push(&way[..end]);
        }
    }
    found
}

/// Says once, on rank 0, how NCCL connects it. A rank that sends over TCP warns where there is
/// RDMA: with several GPUs a host that need not be rank 0.
pub(super) fn say(version: &str, rank: usize) {
    static SAID: Once = Once::new();
    let Some(file) = LOG.get().and_then(Option::as_ref) else {
        return;
    };
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let log = fs::read(path).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let ways = connections(&log);
    if ways.is_empty() {
        return;
    }
    SAID.call_once(|| {
        if rank == 0 {
            tracing::info!("NCCL {version} connects rank 0 by {}", ways.join(", "));
        }
        if let Some(rdma) = Rdma::of_this_host()
            && ways.contains(&"NET/Socket")
        {
            let unknown = || {
                [
                    "NCCL does not say why".into(),
                    "NCCL_DEBUG=INFO shows more".into(),
                ]
            };
            let [why, help] = rdma.problem().cloned().unwrap_or_else(unknown);
            tracing::warn!(
                "NCCL moves gradients between hosts over TCP, though this host has {rdma}: {why}; \
                 help: {help}; see docs/clusters.md, \"A network with RDMA\""
            );
        }
    });
}

#[cfg(test)]
mod tests {
    use std::env::temp_dir;
    use std::process::Command;

    use super::*;

    #[test]
    fn ways_are_named_once_without_their_numbers() {
        // As NCCL 2.18 to 2.30 write them (src/transport/p2p.cc, shm.cc, net.cc).
        let log = "\
n1:7:9 [0] NCCL INFO Using network IB
n1:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
n1:7:9 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
n1:7:9 [0] NCCL INFO Channel 02 : 0[0] -> 3[3] via SHM/direct/direct
n1:7:9 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
n1:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0
n1:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer
n1:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/0/GDRDMA
";
        assert_eq!(
            connections(log),
            [
                "P2P/CUMEM",
                "SHM/direct",
                "NET/IB",
                "NET/Socket",
                "P2P/direct",
                "NET/AWS Libfabric"
            ]
        );
        assert!(connections("").is_empty());
    }

    #[test]
    fn the_users_log_stays_the_users() {
        let set = |name: &str| (name == "NCCL_DEBUG").then(|| "WARN".to_string());
        assert_eq!(settings(&set, None, ""), None);
        // Of a process with this number that was killed: the log had this name for a moment.
        let left = temp_dir().join(format!("ddp-nccl-{}", std::process::id()));
        fs::write(&left, "").unwrap();
        let [level, parts, to] = settings(&|_: &str| None, None, "").unwrap();
        fs::remove_file(&left).unwrap();
        assert_eq!([level.1, parts.1], ["INFO", "INIT"]);
        // NCCL opens it to write, this process reads it.
        fs::write(&to.1, "one line").unwrap();
        assert_eq!(fs::read_to_string(&to.1).unwrap(), "one line");
        assert_eq!(settings(&|_: &str| None, None, "").unwrap()[2].1, to.1);

        let home = temp_dir().join(format!("ddp-nccl-conf-{}", std::process::id()));
        fs::create_dir(&home).unwrap();
        let file = home.join(".nccl.conf");
        let [home, named] = [&home, &file].map(|path| path.display().to_string());
        let settings = |[asked, value]: [&str; 2], home: Option<&str>, system: &str| {
            let set = |name: &str| (name == asked).then(|| value.to_string());
            settings(&set, home.map(str::to_string), system)
        };
        for (text, is_the_users) in [
            ("NCCL_DEBUG_FILE=/var/log/nccl.%h\n", true),
            ("NCCL_IB_HCA=mlx5\nNCCL_DEBUG = INFO\n", true),
            ("# NCCL_DEBUG=INFO\nNCCL_DEBUG_LEVEL=1\n", false),
        ] {
            fs::write(&file, text).unwrap();
            let [unset, own] = [["", ""], ["NCCL_CONF_FILE", &named]];
            for (variable, home, system) in [
                (own, None, ""),
                (["NCCL_CONF_FILE", ""], Some(&*home), ""),
                (unset, Some(&*home), ""),
                (unset, None, &*named),
            ] {
                let is_asked = settings(variable, home, system).is_none();
                let what = format!("{variable:?}, {home:?}, {system:?}: {text}");
                assert_eq!(is_asked, is_the_users, "{what}");
            }
            // NCCL does not look at HOME, and not into the home folder if another file is named.
            assert!(settings(["HOME", &home], None, "").is_some());
            let other = ["NCCL_CONF_FILE", "missing.conf"];
            assert!(settings(other, Some(&home), "").is_some());
        }
        fs::remove_dir_all(&home).unwrap();
    }

    #[test]
    fn the_home_folder_is_that_of_the_password_database() {
        // SAFETY: it takes nothing and cannot fail.
        let user = unsafe { libc::getuid() }.to_string();
        let Ok(found) = Command::new("getent").args(["passwd", &user]).output() else {
            return ddp_testing::skip("no getent");
        };
        // name:password:user:group:comment:home:shell, or nothing if the database lacks the user.
        let line = String::from_utf8(found.stdout).unwrap();
        assert_eq!(home().as_deref(), line.split(':').nth(5));
    }
}
