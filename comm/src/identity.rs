//! Who this process is among the ranks of its job.

use std::path::PathBuf;

/// The most ranks of a job.
pub const RANKS_MAX: usize = 512;
/// The most ranks of one host.
pub const HOST_RANKS_MAX: usize = 256;

/// A rank's place in its job.
#[derive(Clone, Debug)]
pub(crate) struct RankIdentity {
    /// The program's name, which begins the last line of a failed job.
    pub(crate) program: String,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// The rank among those of its host, from 0.
    pub(crate) local_rank: usize,
    pub(crate) local_size: usize,
    pub(crate) host: String,
}

impl RankIdentity {
    /// One of `size` ranks that are all in this process.
    pub(crate) fn in_process(program: String, rank: usize, size: usize) -> RankIdentity {
        RankIdentity {
            program,
            rank,
            size,
            local_rank: rank,
            local_size: size,
            host: host_name(),
        }
    }
}

/// The name of the file that this process runs.
pub(crate) fn program_name() -> String {
    let path = std::env::args_os().next().map(PathBuf::from);
    let name = path.as_ref().and_then(|path| path.file_name());
    name.map_or_else(|| "ddp".into(), |name| name.to_string_lossy().into_owned())
}

/// The name of this machine.
pub(crate) fn host_name() -> String {
    let mut name = [0u8; 256];
    // SAFETY: the call writes at most the given length, one less than the buffer has, so that a
    // zero byte stays at the end.
    unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    let length = name.iter().position(|&byte| byte == 0).unwrap_or(0);
    match String::from_utf8_lossy(&name[..length]).into_owned() {
        name if name.is_empty() => "localhost".into(),
        name => name,
    }
}
