//! Which GPU is mine: from what every rank of a job sees, ordinals for each, so that no two ranks have the same GPU.
//!
//! Ranks see GPUs in different ways. A whole node: all ranks of a host see all its GPUs, and the first rank takes the first. One a
//! task, as Slurm and pods arrange it: every rank sees a GPU of its own and calls it `cuda:0`. Or something in between. A UUID
//! names a GPU wherever it is seen, so one rule covers all of them, and containers of one machine under several host names
//! too: in the order of ranks, each takes the first GPUs that it sees and nobody has, and where none is left, one that has
//! another to go to makes room. So there is an assignment if one is possible, and where all see the same, the n-th rank has the
//! n-th group.
//!
//! A driver that tells no UUIDs is believed to show all ranks of a host the same GPUs in the same order.
//!
//! What a process sees (CUDA_VISIBLE_DEVICES) is never narrowed: copies between GPUs need to see both.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use ddp_kernels::Device;
use ddp_kernels::device::discover;
use serde_json::{Value, json};

use crate::error::{Error, Ranks, Result};
use crate::handshake::Field;
use crate::world::World;

/// Lines of a table that are shown; the ranks of one host are rarely more.
const LINES_MAX: usize = 16;
/// GPUs that a line lists.
const LISTED_MAX: usize = 8;

/// What one rank sees.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sight {
    /// The name of its host.
    pub host: String,
    /// The UUIDs of its GPUs, in its own order: the first is its `cuda:0`. Empty texts from a driver that tells none.
    pub uuids: Vec<String>,
    /// Why it sees none, and what to do.
    pub why_none: Option<String>,
}

/// One rank's line of a [`GpuTable`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankGpus {
    /// What it sees.
    pub sight: Sight,
    /// The ordinals, in its own order, of those that are its own.
    pub gets: Vec<usize>,
}

/// Who has which GPU, for all ranks of a job and the same on each of them. Its `Display` is a line a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuTable {
    /// A line a rank.
    pub ranks: Vec<RankGpus>,
    /// Ranks that have a GPU in common with another; none unless they may share.
    pub sharing: Vec<usize>,
}

/// There are fewer GPUs than ranks need. Its `Display` says who lacks how many and lists the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// What each rank sees, and what there is for it.
    pub table: GpuTable,
    /// How many each rank needs.
    pub per_rank: usize,
    /// The ranks that see too few between them.
    pub lacking: Vec<usize>,
    /// How many these see between them.
    pub seen: usize,
}

impl World {
    /// The GPUs that are each rank's own, `per_rank` of them: the same table on all ranks, which all call this at the same
    /// place with the same numbers. With `share` ranks may have the same GPUs, in turn, where there are too few.
    ///
    /// The inner error is found by all ranks alike: each can do the same about it. `?` twice makes it an error of this crate.
    #[track_caller]
    pub fn assign_gpus(&self, per_rank: usize, share: bool) -> Result<Result<GpuTable, Shortage>> {
        let way_out = "Ask for the same on all ranks.";
        self.handshake(&[
            Field::must_match("the number of GPUs a rank", per_rank, way_out),
            Field::must_match("whether ranks may share GPUs", share, way_out),
        ])?;
        let seen = self.all_gather_bytes(&Sight::own(self.host()).encode())?;
        Ok(assign(seen.iter().map(|bytes| Sight::decode(bytes)).collect(), per_rank, share))
    }
}

impl Sight {
    /// What this process sees, on the host called `host`.
    fn own(host: &str) -> Sight {
        let found = discover();
        let uuids = found.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        Sight { host: host.into(), uuids, why_none: found.why_no_gpu.clone() }
    }

    fn encode(&self) -> Vec<u8> {
        json!([self.host, self.uuids, self.why_none]).to_string().into_bytes()
    }

    /// What `encode` wrote; one that sees nothing where another version of this program wrote something else.
    fn decode(bytes: &[u8]) -> Sight {
        let value: Value = serde_json::from_slice(bytes).unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        let uuids = value[1].as_array().map_or_else(Vec::new, |uuids| uuids.iter().map(text).collect());
        Sight { host: text(&value[0]), uuids, why_none: value[2].as_str().map(str::to_string) }
    }

    /// What names each of its GPUs in the whole job: its UUID, or else its place on its host.
    fn names(&self) -> impl Iterator<Item = String> {
        let name = |(ordinal, uuid): (usize, &String)| match uuid.as_str() {
            "" => format!("{}, cuda:{ordinal}", self.host),
            uuid => uuid.to_string(),
        };
        self.uuids.iter().enumerate().map(name)
    }
}

/// Gives each of the ranks that see `sights` its `per_rank` GPUs.
///
/// # Panics
/// If `per_rank` is 0.
pub fn assign(sights: Vec<Sight>, per_rank: usize, share: bool) -> Result<GpuTable, Shortage> {
    assert!(per_rank > 0, "a rank without GPUs is not asked for GPUs");
    let graph = Graph::new(&sights);
    let mut holders = vec![None; graph.gpu_count];
    let mut short: Vec<usize> = Vec::new();
    for rank in 0..sights.len() {
        let got_all = (0..per_rank).all(|_| graph.take(rank, &mut holders, &mut vec![false; graph.gpu_count]));
        if !got_all {
            short.push(rank);
        }
    }
    let mut gets: Vec<Vec<usize>> = (0..sights.len()).map(|rank| graph.ordinals_held(rank, &holders)).collect();
    let blind = sights.iter().any(|sight| sight.uuids.is_empty());
    if short.is_empty() || (share && !blind) {
        let sharing = if short.is_empty() { Vec::new() } else { graph.share(&short, per_rank, &mut gets) };
        return Ok(GpuTable { ranks: lines(sights, gets), sharing });
    }
    let first = if share { sights.iter().position(|sight| sight.uuids.is_empty()) } else { None };
    let (lacking, seen) = graph.bottleneck(first.unwrap_or(short[0]), &holders);
    Err(Shortage { table: GpuTable { ranks: lines(sights, gets), sharing: Vec::new() }, per_rank, lacking, seen })
}

fn lines(sights: Vec<Sight>, gets: Vec<Vec<usize>>) -> Vec<RankGpus> {
    sights.into_iter().zip(gets).map(|(sight, gets)| RankGpus { sight, gets }).collect()
}

/// Which rank sees which GPU, each GPU by one number wherever it is seen.
struct Graph {
    /// A list a rank, by its ordinals.
    sees: Vec<Vec<usize>>,
    gpu_count: usize,
}

impl Graph {
    fn new(sights: &[Sight]) -> Graph {
        let mut numbers = BTreeMap::new();
        let mut number = |name: String| {
            let next = numbers.len();
            *numbers.entry(name).or_insert(next)
        };
        let sees = sights.iter().map(|sight| sight.names().map(&mut number).collect()).collect();
        Graph { sees, gpu_count: numbers.len() }
    }

    /// Gives `rank` one GPU more, if need be by moving others that can go elsewhere. `asked` are those that were looked at in
    /// vain.
    fn take(&self, rank: usize, holders: &mut [Option<usize>], asked: &mut [bool]) -> bool {
        if let Some(&free) = self.sees[rank].iter().find(|&&gpu| holders[gpu].is_none()) {
            holders[free] = Some(rank);
            return true;
        }
        for &gpu in &self.sees[rank] {
            let Some(holder) = holders[gpu] else { continue };
            if !std::mem::replace(&mut asked[gpu], true) && self.take(holder, holders, asked) {
                holders[gpu] = Some(rank);
                return true;
            }
        }
        false
    }

    fn ordinals_held(&self, rank: usize, holders: &[Option<usize>]) -> Vec<usize> {
        let is_held = |(ordinal, gpu): (usize, &usize)| (holders[*gpu] == Some(rank)).then_some(ordinal);
        self.sees[rank].iter().enumerate().filter_map(is_held).collect()
    }

    /// All ranks that have to do with `rank`: those that see what it sees, those that see what these see, and so on.
    fn neighbours(&self, rank: usize) -> Vec<usize> {
        let (mut ranks, mut seen) = (BTreeSet::from([rank]), vec![false; self.gpu_count]);
        loop {
            ranks.iter().flat_map(|&rank| &self.sees[rank]).for_each(|&gpu| seen[gpu] = true);
            let before = ranks.len();
            ranks.extend((0..self.sees.len()).filter(|&rank| self.sees[rank].iter().any(|&gpu| seen[gpu])));
            if ranks.len() == before {
                return ranks.into_iter().collect();
            }
        }
    }

    /// Lets the ranks around those that are `short` go through the GPUs that they see, in turn. Those that have one in common with
    /// another then.
    fn share(&self, short: &[usize], per_rank: usize, gets: &mut [Vec<usize>]) -> Vec<usize> {
        let groups: BTreeSet<Vec<usize>> = short.iter().map(|&rank| self.neighbours(rank)).collect();
        let mut users = vec![BTreeSet::new(); self.gpu_count];
        for group in &groups {
            for (place, &rank) in group.iter().enumerate() {
                let visible = self.sees[rank].len();
                gets[rank] = (0..per_rank).map(|index| (place * per_rank + index) % visible).collect();
                gets[rank].iter().for_each(|&ordinal| _ = users[self.sees[rank][ordinal]].insert(rank));
            }
        }
        let shared = users.iter().filter(|users| users.len() > 1).flatten().copied().collect::<BTreeSet<usize>>();
        shared.into_iter().collect()
    }

    /// Why `rank`, which is short of GPUs, cannot have more: ranks that see fewer GPUs between them than they need, and how many
    /// these are. All ranks that see nothing else are among them.
    fn bottleneck(&self, rank: usize, holders: &[Option<usize>]) -> (Vec<usize>, usize) {
        // What it sees is held by ranks that cannot give it up, for all that these see is held by such ranks in turn.
        let (mut ranks, mut seen) = (vec![rank], BTreeSet::new());
        let mut next = 0;
        while let Some(&rank) = ranks.get(next) {
            next += 1;
            for &gpu in &self.sees[rank] {
                seen.insert(gpu);
                ranks.extend(holders[gpu].filter(|holder| !ranks.contains(holder)));
            }
        }
        let sees_no_more = |rank: &usize| self.sees[*rank].iter().all(|gpu| seen.contains(gpu));
        let lacking = (0..self.sees.len()).filter(|rank| ranks.contains(rank) || sees_no_more(rank)).collect();
        (lacking, seen.len())
    }
}

impl GpuTable {
    /// The devices of `rank`.
    pub fn devices_of(&self, rank: usize) -> Vec<Device> {
        self.ranks[rank].gets.iter().copied().map(Device::Cuda).collect()
    }

    /// Whether any rank sees a GPU at all.
    pub fn has_gpus(&self) -> bool {
        self.ranks.iter().any(|line| !line.sight.uuids.is_empty())
    }

    /// The lines of `shown`, in columns.
    fn write(&self, f: &mut fmt::Formatter<'_>, shown: &[usize]) -> fmt::Result {
        let length = self.uuid_length();
        let rows: Vec<[String; 3]> = shown.iter().map(|&rank| self.row(rank, shown, length)).collect();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let (first, second) = (width(0), width(1));
        for (index, [name, gets, sees]) in rows.iter().take(LINES_MAX).enumerate() {
            let line_end = if index == 0 { "" } else { "\n" };
            write!(f, "{line_end}  {name:first$}  {gets:second$}  {sees}")?;
        }
        match shown.len().saturating_sub(LINES_MAX) {
            0 => Ok(()),
            more => write!(f, "\n  and {more} ranks more"),
        }
    }

    /// Who, what it gets, what it sees. What an earlier one of `shown` sees as well is not listed again.
    fn row(&self, rank: usize, shown: &[usize], uuid_length: usize) -> [String; 3] {
        let RankGpus { sight, gets } = &self.ranks[rank];
        let gpu = |ordinal: usize| Device::Cuda(ordinal).to_string();
        let gets = if gets.is_empty() { vec!["none".into()] } else { gets.iter().copied().map(gpu).collect() };
        let is_same = |other: &&usize| {
            let other = &self.ranks[**other].sight;
            (&other.uuids, &other.why_none, &other.host) == (&sight.uuids, &sight.why_none, &sight.host)
        };
        let sees = match shown.iter().find(is_same) {
            Some(&earlier) if earlier != rank => format!("the same as rank {earlier}"),
            _ if sight.uuids.is_empty() => {
                format!("none: {}", sight.why_none.as_deref().unwrap_or("it does not say why"))
            }
            _ => {
                let named = |(ordinal, uuid): (usize, &String)| match uuid.get(..uuid_length).unwrap_or(uuid) {
                    "" => gpu(ordinal),
                    uuid => format!("{} {uuid}", gpu(ordinal)),
                };
                let mut list: Vec<String> = sight.uuids.iter().take(LISTED_MAX).enumerate().map(named).collect();
                if sight.uuids.len() > LISTED_MAX {
                    list.push(format!("… {} in all", sight.uuids.len()));
                }
                list.join(", ")
            }
        };
        [format!("rank {rank} on {}", sight.host), format!("gets {}", gets.join(", ")), format!("sees {sees}")]
    }

    /// How much of a UUID tells them apart: `GPU-` and 8 digits, as a rule.
    fn uuid_length(&self) -> usize {
        const SHORT: usize = 12;
        let uuids: BTreeSet<&str> = self.ranks.iter().flat_map(|line| &line.sight.uuids).map(String::as_str).collect();
        let cut: BTreeSet<&str> = uuids.iter().map(|uuid| uuid.get(..SHORT).unwrap_or(uuid)).collect();
        if cut.len() == uuids.len() { SHORT } else { usize::MAX }
    }
}

impl fmt::Display for GpuTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, &(0..self.ranks.len()).collect::<Vec<_>>())
    }
}

impl Shortage {
    /// What to do about it: a sentence.
    pub fn way_out(&self) -> String {
        let (fit, all) = (self.seen / self.per_rank, self.lacking.len() == self.table.ranks.len());
        let fewer = match fit {
            0 => None,
            1 if all => Some("start one rank".to_string()),
            _ if all => Some(format!("start {fit} ranks (-n {fit})")),
            _ => Some(format!("start at most {fit} of these ranks there")),
        };
        let smaller = (self.per_rank > 1).then(|| format!("lower --devices-per-rank {}", self.per_rank));
        let share = "let ranks share GPUs with --share-gpus, which is for tests";
        let share = (self.seen > 0 && self.lacking.len() > 1).then(|| share.to_string());
        let all = [fewer, smaller, Some("train without GPUs with --device cpu".into()), share];
        let mut text = all.into_iter().flatten().collect::<Vec<_>>().join(", or ");
        text[..1].make_ascii_uppercase();
        text + "."
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = |count: usize| if count == 1 { "1 GPU".to_string() } else { format!("{count} GPUs") };
        let (needs, see) = if self.lacking.len() == 1 { ("needs", "sees") } else { ("need", "see") };
        let needed = plural(self.lacking.len() * self.per_rank);
        let between = if self.lacking.len() > 1 && self.seen > 0 { " between them" } else { "" };
        let seen = if self.seen == 0 { "none".to_string() } else { self.seen.to_string() };
        writeln!(f, "{} {needs} {needed} and {see} {seen}{between}:", Ranks(&self.lacking))?;
        let all: Vec<usize> = (0..self.table.ranks.len()).collect();
        self.table.write(f, if all.len() > LINES_MAX { &self.lacking } else { &all })
    }
}

impl From<Shortage> for Error {
    fn from(shortage: Shortage) -> Error {
        Error::Setup {
            action: "give every rank GPUs of its own".into(),
            reason: shortage.to_string(),
            way_out: shortage.way_out(),
        }
    }
}

#[cfg(test)]
mod tests;
