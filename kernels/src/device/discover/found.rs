//! What discovery finds: GPUs and libraries.

use std::fmt;
use std::path::PathBuf;

use crate::message::human_bytes;

/// One GPU, as the driver describes it. An unanswered question leaves the field empty or zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its index in this process: the N of `cuda:N`.
    pub index: usize,
    /// The vendor's name for it.
    pub name: String,
    /// All its memory, free or used.
    pub memory_bytes: u64,
    /// Major and minor, `(9, 0)` for sm_90.
    pub compute_capability: (u32, u32),
    /// `GPU-` (`MIG-` for a slice of a GPU) and 32 hexadecimal digits. The same in every process,
    /// unlike the index.
    pub uuid: String,
}

/// One library of CUDA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// Its name.
    pub what: &'static str,
    /// Its file.
    pub found: Option<PathBuf>,
    /// Its version, as far as file names tell: only `2` for a bare `libnccl.so.2`.
    pub version: Option<String>,
    /// How to fix it if it is missing or broken.
    pub advice: Option<String>,
    /// All files of that name, in the order in which they are tried.
    pub candidates: Vec<Candidate>,
}

/// A file that may be the library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The file, or the link to it that programs load.
    pub path: PathBuf,
    /// Its version, as far as file names tell.
    pub version: Option<String>,
    /// Why it is not tried.
    pub skipped: Option<String>,
}

impl Library {
    /// Whether it was found and looks usable.
    pub fn is_sound(&self) -> bool {
        self.found.is_some() && self.advice.is_none()
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<14} ", self.what)?;
        let advice = self.advice.as_deref();
        let Some(path) = &self.found else {
            let advice = advice.unwrap_or("no advice");
            return write!(
                f,
                "{}{advice}",
                if advice.starts_with("broken") {
                    ""
                } else {
                    "not found: "
                }
            );
        };
        write!(f, "{}", path.display())?;
        if let Some(version) = &self.version {
            write!(f, " ({version})")?;
        }
        advice.map_or(Ok(()), |advice| write!(f, ", {advice}"))
    }
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = human_bytes(usize::try_from(self.memory_bytes).unwrap_or(usize::MAX));
        let (major, minor) = self.compute_capability;
        write!(
            f,
            "cuda:{} {}, {memory}, sm_{major}{minor}",
            self.index, self.name
        )?;
        if self.uuid.is_empty() {
            Ok(())
        } else {
            write!(f, ", {}", self.uuid)
        }
    }
}
