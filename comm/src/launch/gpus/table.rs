//! A table of the GPUs that ranks see, and of which rank has which.

use std::collections::BTreeSet;
use std::fmt;

use ddp_kernels::Device;
use ddp_kernels::device::discover;
use serde::{Deserialize, Serialize};

use crate::error::{Error, RankList};

/// Lines of a table that are shown: the ranks of one host are rarely more.
const LINES_MAX: usize = 16;
/// GPUs that a line lists.
const LISTED_MAX: usize = 8;

/// What one rank sees.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VisibleGpus {
    /// The name of its host.
    pub host: String,
    /// The UUIDs of its GPUs in its own order: the first is its `cuda:0`. Empty texts from a driver
    /// that reports none.
    pub uuids: Vec<String>,
    /// Why it sees none, and what to do.
    pub why_none: Option<String>,
}

impl VisibleGpus {
    /// What this process sees, on the host called `host`.
    pub(crate) fn own(host: &str) -> VisibleGpus {
        let found = discover();
        VisibleGpus {
            host: host.into(),
            uuids: found.gpus.iter().map(|gpu| gpu.uuid.clone()).collect(),
            why_none: found.why_no_gpu.clone(),
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("texts fit JSON")
    }

    /// What `encode` wrote; no GPUs if another version of this program wrote something else.
    pub(crate) fn decode(bytes: &[u8]) -> VisibleGpus {
        serde_json::from_slice(bytes).unwrap_or_default()
    }

    /// What identifies each GPU in the whole job: its UUID, or its host and ordinal.
    pub(super) fn names(&self) -> impl Iterator<Item = String> {
        let name = |(ordinal, uuid): (usize, &String)| match uuid.as_str() {
            "" => format!("{}, cuda:{ordinal}", self.host),
            uuid => uuid.to_string(),
        };
        self.uuids.iter().enumerate().map(name)
    }
}

/// One rank's line of a [`GpuTable`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankGpus {
    /// What it sees.
    pub visible: VisibleGpus,
    /// The ordinals, in its own order, of the GPUs that it gets.
    pub gets: Vec<usize>,
}

/// Which rank has which GPU, for all ranks of a job. `Display` shows a line for each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuTable {
    /// A line for each rank.
    pub ranks: Vec<RankGpus>,
    /// Ranks that have a GPU in common with another.
    pub sharing: Vec<usize>,
}

/// There are fewer GPUs than ranks need. `Display` shows who lacks how many, and the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// What each rank sees, and what it would get.
    pub table: GpuTable,
    /// How many GPUs each rank needs.
    pub per_rank: usize,
    /// The ranks that see too few between them.
    pub lacking: Vec<usize>,
    /// How many GPUs these ranks see between them.
    pub seen: usize,
}

impl GpuTable {
    /// The devices of `rank`.
    pub fn devices_of(&self, rank: usize) -> Vec<Device> {
        let gets = self.ranks[rank].gets.iter();
        gets.copied().map(Device::Cuda).collect()
    }

    /// The lines of some ranks only.
    pub(crate) fn of(&self, ranks: &[usize]) -> GpuTable {
        let is_in = |rank: &usize| self.sharing.contains(&ranks[*rank]);
        GpuTable {
            ranks: ranks.iter().map(|&rank| self.ranks[rank].clone()).collect(),
            sharing: (0..ranks.len()).filter(is_in).collect(),
        }
    }

    /// Whether any rank sees a GPU.
    pub fn has_gpus(&self) -> bool {
        self.ranks.iter().any(|line| !line.visible.uuids.is_empty())
    }

    /// Writes the lines of the ranks `shown`, in columns.
    fn write(&self, f: &mut fmt::Formatter<'_>, shown: &[usize]) -> fmt::Result {
        let length = self.uuid_length();
        let row = |&rank: &usize| self.row(rank, shown, length);
        let rows: Vec<[String; 3]> = shown.iter().take(LINES_MAX).map(row).collect();
        let width = |column: usize| {
            let widths = rows.iter().map(|row| row[column].chars().count());
            widths.max().unwrap_or(0)
        };
        let (first, second) = (width(0), width(1));
        for (index, [name, gets, sees]) in rows.iter().enumerate() {
            let line_end = if index == 0 { "" } else { "\n" };
            write!(f, "{line_end}  {name:first$}  {gets:second$}  {sees}")?;
        }
        match shown.len().saturating_sub(LINES_MAX) {
            0 => Ok(()),
            more => write!(f, "\n  and {more} more ranks"),
        }
    }

    /// The rank, what it gets, what it sees. A list that an earlier rank has too is not repeated.
    fn row(&self, rank: usize, shown: &[usize], uuid_length: usize) -> [String; 3] {
        let RankGpus { visible, gets } = &self.ranks[rank];
        let device = |ordinal: usize| Device::Cuda(ordinal).to_string();
        let gets: Vec<String> = gets.iter().copied().map(device).collect();
        let gets = if gets.is_empty() {
            "none".into()
        } else {
            gets.join(", ")
        };
        let same = shown
            .iter()
            .find(|&&other| self.ranks[other].visible == *visible);
        let sees = match same {
            Some(&earlier) if earlier != rank => format!("the same as rank {earlier}"),
            _ if visible.uuids.is_empty() => {
                let why = visible.why_none.as_deref();
                format!("none: {}", why.unwrap_or("for an unknown reason"))
            }
            _ => {
                let gpu = |(ordinal, uuid): (usize, &String)| {
                    let uuid = uuid.get(..uuid_length).unwrap_or(uuid);
                    format!("{} {uuid}", device(ordinal)).trim_end().to_string()
                };
                let gpus = visible.uuids.iter().take(LISTED_MAX).enumerate().map(gpu);
                let mut list: Vec<String> = gpus.collect();
                if visible.uuids.len() > LISTED_MAX {
                    list.push(format!("… {} in all", visible.uuids.len()));
                }
                list.join(", ")
            }
        };
        let name = format!("rank {rank} on {}", visible.host);
        [name, format!("gets {gets}"), format!("sees {sees}")]
    }

    /// How many bytes of a UUID to show: `GPU-` and 8 digits if these differ.
    fn uuid_length(&self) -> usize {
        const SHORT: usize = 12;
        let uuids = self.ranks.iter().flat_map(|line| &line.visible.uuids);
        let uuids: BTreeSet<&str> = uuids.map(String::as_str).collect();
        let cut = uuids.iter().map(|uuid| uuid.get(..SHORT).unwrap_or(uuid));
        let are_distinct = cut.collect::<BTreeSet<&str>>().len() == uuids.len();
        if are_distinct { SHORT } else { usize::MAX }
    }
}

impl fmt::Display for GpuTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, &(0..self.ranks.len()).collect::<Vec<_>>())
    }
}

impl Shortage {
    /// How many of the lacking ranks the GPUs suffice for.
    pub fn ranks_that_fit(&self) -> usize {
        self.seen / self.per_rank
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, seen) = (self.lacking.len(), self.seen);
        let (needs, sees) = if count == 1 {
            ("needs", "sees")
        } else {
            ("need", "see")
        };
        let needed = match count * self.per_rank {
            1 => "1 GPU".to_string(),
            needed => format!("{needed} GPUs"),
        };
        let seen = match seen {
            0 => "none".to_string(),
            _ if count > 1 => format!("{seen} between them"),
            _ => seen.to_string(),
        };
        writeln!(
            f,
            "{} {needs} {needed} and {sees} {seen}:",
            RankList(&self.lacking)
        )?;
        let all: Vec<usize> = (0..self.table.ranks.len()).collect();
        let shown = if all.len() > LINES_MAX {
            &self.lacking
        } else {
            &all
        };
        self.table.write(f, shown)
    }
}

impl From<Shortage> for Error {
    fn from(shortage: Shortage) -> Error {
        let help = "start fewer ranks, with fewer GPUs a rank, or use the CPU";
        Error::setup("give every rank its own GPUs", shortage, help)
    }
}
