//! The ledger: every transfer's kind, bytes, count and source line, by phase; printed as a table, exported as JSON.
//!
//! Booking is one short lock and one table look-up; the bench prints what `item` costs with it and without (47 and 33 ns).
//!
//! What a thread would book while it captures a graph has not happened yet: the graph keeps it (`Held`), and every launch books it.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use serde_json::{Value, json};

use super::hints::{self, Hint};
use super::policy::Phase;
use crate::Device;
use crate::error::{Place, Site, human_bytes};

/// What crossed, seen from the devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Host memory to a device.
    Upload,
    /// A device to host memory.
    Download,
    /// One device to another.
    Peer,
    /// One device to another that does not see it: through host memory, which is slow.
    Staged,
    /// One number read by `item`. On the CPU nothing crosses (0 bytes), but the same line would on a GPU.
    ScalarRead,
    /// The tensors that this rank gives to collectives. Between ranks, not between this rank's devices: source and target are the
    /// tensor's device.
    Collective,
}

impl Kind {
    /// The kind of a copy between two different devices.
    pub(crate) fn between(source: Device, target: Device) -> Kind {
        match (source, target) {
            (Device::Cpu, _) => Kind::Upload,
            (_, Device::Cpu) => Kind::Download,
            _ => Kind::Peer,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Kind::Upload => "host to device",
            Kind::Download => "device to host",
            Kind::Peer => "device to device",
            Kind::Staged => "via host memory",
            Kind::ScalarRead => "scalar read",
            Kind::Collective => "between ranks",
        })
    }
}

/// What rows are told apart by. The site is compared by address: one line may be two rows, never the reverse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) kind: Kind,
    pub(crate) phase: Phase,
    pub(crate) source: Device,
    pub(crate) target: Device,
    /// Moved by policy rather than by a call of the user's.
    pub(crate) implicit: bool,
    pub(crate) site: Site,
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state
            .write_usize(std::ptr::from_ref(self.site).addr() ^ (self.kind as usize) << 1 ^ (self.phase as usize) << 3);
    }
}

/// A multiplicative hash: the keys are addresses, not an attacker's strings.
#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_usize(usize::from(byte));
        }
    }
    fn write_usize(&mut self, value: usize) {
        self.0 = (self.0.rotate_left(5) ^ value as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// What is known of one transfer beyond its key: what the hints are made from.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Circumstances {
    pub(crate) bytes: usize,
    pub(crate) announced: Option<&'static str>,
    /// The host side is ordinary memory, not pinned.
    pub(crate) pageable: bool,
    /// The tensor was made here by a constructor and never used before it was moved.
    pub(crate) made_only_to_move: Option<Site>,
    /// The tensor had come from the very device it goes to, by this line, and nothing changed it meanwhile.
    pub(crate) came_from_target: Option<Site>,
}

/// The sums of one row.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sums {
    pub(crate) count: u64,
    pub(crate) bytes: u64,
    pub(crate) announced: Option<&'static str>,
    pub(crate) pageable_count: u64,
    pub(crate) made_only_to_move_count: u64,
    pub(crate) made_at: Option<Site>,
    pub(crate) returned_count: u64,
    pub(crate) came_by: Option<Site>,
}

impl Sums {
    /// Those of one transfer.
    fn of(seen: Circumstances) -> Sums {
        Sums {
            count: 1,
            bytes: seen.bytes as u64,
            announced: seen.announced,
            pageable_count: u64::from(seen.pageable),
            made_only_to_move_count: u64::from(seen.made_only_to_move.is_some()),
            made_at: seen.made_only_to_move,
            returned_count: u64::from(seen.came_from_target.is_some()),
            came_by: seen.came_from_target,
        }
    }

    fn add(&mut self, other: &Sums) {
        self.count += other.count;
        self.bytes += other.bytes;
        self.announced = self.announced.or(other.announced);
        self.pageable_count += other.pageable_count;
        self.made_only_to_move_count += other.made_only_to_move_count;
        self.made_at = self.made_at.or(other.made_at);
        self.returned_count += other.returned_count;
        self.came_by = self.came_by.or(other.came_by);
    }
}

/// What was to be booked in the course of a capture: booked by each launch of its graph instead.
#[derive(Debug, Default)]
pub(crate) struct Held(Vec<(Key, Sums)>);

impl Held {
    pub(crate) fn hold(&mut self, key: Key, seen: Circumstances) {
        let sums = Sums::of(seen);
        match self.0.iter_mut().find(|(held, _)| *held == key) {
            Some((_, held)) => held.add(&sums),
            None => self.0.push((key, sums)),
        }
    }
}

/// One line of the ledger.
#[derive(Clone, Debug)]
pub struct Row {
    /// The part of the run.
    pub phase: Phase,
    /// What crossed.
    pub kind: Kind,
    /// From where.
    pub source: Device,
    /// To where.
    pub target: Device,
    /// The caller's line.
    pub site: Site,
    /// How often.
    pub count: u64,
    /// Bytes in all.
    pub bytes: u64,
    /// Whether a policy moved it, not a call.
    pub implicit: bool,
    /// The reason it was announced with, if it was.
    pub announced: Option<&'static str>,
}

impl Row {
    /// Where it went, for people: a device, or the other ranks.
    pub fn target_name(&self) -> String {
        match self.kind {
            Kind::Collective => "ranks".to_string(),
            _ => self.target.to_string(),
        }
    }

    /// The caller's line, as `src/train.rs:12`.
    pub fn place(&self) -> impl fmt::Display {
        Place(self.site)
    }
}

/// So many bytes as people read them: `512 B`, `1.5 KiB`.
pub fn readable_bytes(bytes: u64) -> String {
    human_bytes(usize::try_from(bytes).unwrap_or(usize::MAX))
}

/// A book of transfers. There is one a process; tests and measured sections may keep their own (`with_ledger`).
#[derive(Debug, Default)]
pub struct Ledger {
    rows: Mutex<HashMap<Key, Sums, BuildHasherDefault<AddressHasher>>>,
}

impl Ledger {
    /// An empty book.
    pub fn new() -> Arc<Ledger> {
        Arc::default()
    }

    /// The book of this process, in which everything stands that no `with_ledger` scope took for itself.
    pub fn of_process() -> Arc<Ledger> {
        static OF_PROCESS: OnceLock<Arc<Ledger>> = OnceLock::new();
        OF_PROCESS.get_or_init(Ledger::new).clone()
    }

    /// The book that transfers of this thread go into now.
    pub fn current() -> Arc<Ledger> {
        super::policy::with_rules(|rules| rules.ledger.clone())
    }

    pub(crate) fn book(&self, key: Key, seen: Circumstances) {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default().add(&Sums::of(seen));
    }

    /// Books what a graph holds, launched in `phase`.
    pub(crate) fn book_held(&self, held: &Held, phase: Phase) {
        if held.0.is_empty() {
            return;
        }
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        for (key, sums) in &held.0 {
            rows.entry(Key { phase, ..*key }).or_default().add(sums);
        }
    }

    fn sorted(&self) -> Vec<(Key, Sums)> {
        let rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sorted: Vec<(Key, Sums)> = rows.iter().map(|(key, sums)| (*key, *sums)).collect();
        drop(rows);
        // Two calls on one source line are one row for people.
        let line =
            |key: &Key| (key.phase, key.kind, key.source, key.target, key.implicit, key.site.file(), key.site.line());
        sorted.sort_by_key(|(key, _)| (line(key), key.site.column()));
        sorted.dedup_by(|(key, sums), (kept, kept_sums)| {
            let same = line(key) == line(kept);
            if same {
                kept_sums.add(sums);
            }
            same
        });
        sorted.sort_by_key(|(key, sums)| (key.phase, std::cmp::Reverse(sums.bytes), key.site, key.kind, key.source));
        sorted
    }

    /// Every row: by phase, then the most bytes first.
    pub fn rows(&self) -> Vec<Row> {
        let row = |(key, sums): (Key, Sums)| Row {
            phase: key.phase,
            kind: key.kind,
            source: key.source,
            target: key.target,
            site: key.site,
            count: sums.count,
            bytes: sums.bytes,
            implicit: key.implicit,
            announced: sums.announced,
        };
        self.sorted().into_iter().map(row).collect()
    }

    /// How many transfers and bytes crossed between devices. A scalar read on the CPU crosses nothing, nor do collectives: those
    /// stand in the rows.
    pub fn crossed(&self) -> (u64, u64) {
        let crossing = self.rows().into_iter().filter(|row| row.source != row.target);
        crossing.fold((0, 0), |(count, bytes), row| (count + row.count, bytes + row.bytes))
    }

    /// The patterns that cost time, each with its lines and what to do.
    pub fn hints(&self) -> Vec<Hint> {
        hints::find(&self.sorted())
    }

    /// Forgets everything booked so far.
    pub fn clear(&self) {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// The whole book: `{"rows": [...], "crossed": {"count", "bytes"}, "hints": [...]}`.
    pub fn to_json(&self) -> Value {
        let (count, bytes) = self.crossed();
        let rows: Vec<Value> = self
            .rows()
            .iter()
            .map(|row| {
                json!({
                    "phase": row.phase.to_string(),
                    "kind": row.kind.to_string(),
                    "from": row.source.to_string(),
                    "to": row.target_name(),
                    "count": row.count,
                    "bytes": row.bytes,
                    "implicit": row.implicit,
                    "announced": row.announced,
                    "at": row.place().to_string(),
                })
            })
            .collect();
        let hints: Vec<Value> = self.hints().iter().map(Hint::to_json).collect();
        json!({ "rows": rows, "crossed": { "count": count, "bytes": bytes }, "hints": hints })
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.rows();
        if rows.is_empty() {
            return writeln!(f, "no transfers");
        }
        writeln!(f, "{:<11}{:<18}{:<9}{:<9}{:>9}{:>12}  line", "phase", "kind", "from", "to", "count", "bytes")?;
        for row in &rows {
            let announced = row.announced.map(|reason| format!(" (announced: {reason})")).unwrap_or_default();
            let note = if row.implicit { " (moved by policy)" } else { &announced };
            writeln!(
                f,
                "{:<11}{:<18}{:<9}{:<9}{:>9}{:>12}  {}{note}",
                row.phase,
                row.kind,
                row.source,
                row.target_name(),
                row.count,
                readable_bytes(row.bytes),
                row.place()
            )?;
        }
        for hint in self.hints() {
            writeln!(f, "hint: {hint}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
