//! `Registry`: the named parameters and buffers of one model. They move as a whole, are listed by device, and what was
//! left behind on another device is found by name, registered or not.
//!
//! Parameters are trained; buffers (masks, tables, running means) are not, but have to be where the model is. A
//! helper tensor that is neither is what gets left behind.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, LiveTensor, Place, Result, Site, human_bytes};
use crate::{Device, Tensor, memory};

/// How many names an error suggests.
const NAMES_SUGGESTED_MAX: usize = 3;

/// What a registered tensor is to its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Trained.
    Parameter,
    /// Not trained, but part of the model.
    Buffer,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Role::Parameter => "parameter",
            Role::Buffer => "buffer",
        })
    }
}

/// One registered tensor.
#[derive(Debug)]
pub struct Entry {
    name: String,
    role: Role,
    tensor: Tensor,
    _listed: Listed,
}

impl Entry {
    /// The full name: the registry's prefix, a dot, the name it was registered under.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Parameter or buffer.
    pub fn role(&self) -> Role {
        self.role
    }

    /// The tensor, which bears the full name.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    fn set(&mut self, tensor: Tensor) {
        self._listed = Listed::new(&tensor);
        self.tensor = tensor;
    }
}

/// The storages that some registry of this process holds: what stands here is nobody's leftover. Ranks that are
/// threads have registries of the same prefix on different devices.
static LISTED: Mutex<BTreeMap<u64, usize>> = Mutex::new(BTreeMap::new());

fn listed() -> MutexGuard<'static, BTreeMap<u64, usize>> {
    // Counts are changed in one step each: a panic cannot leave the map half changed.
    LISTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One registration of a storage, by its id, for as long as it lasts.
#[derive(Debug)]
struct Listed(u64);

impl Listed {
    fn new(tensor: &Tensor) -> Listed {
        let id = tensor.storage().id();
        *listed().entry(id).or_default() += 1;
        Listed(id)
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        let mut listed = listed();
        if let Some(count) = listed.get_mut(&self.0) {
            *count -= 1;
            if *count == 0 {
                listed.remove(&self.0);
            }
        }
    }
}

/// Named parameters and buffers that move as a whole.
#[derive(Debug)]
pub struct Registry {
    prefix: String,
    entries: Vec<Entry>,
    /// Where the last `to` brought everything.
    moved_to: Option<Device>,
}

/// Entries of one storage whose bytes overlap, the one that begins first and reaches furthest in front.
struct Tied {
    members: Vec<usize>,
    bytes: Range<usize>,
    /// A member with bytes that the first does not have.
    beyond_first: Option<usize>,
}

impl Registry {
    /// An empty registry, whose names begin with `prefix` and a dot, or with nothing if the prefix is empty.
    pub fn new(prefix: &str) -> Registry {
        Registry { prefix: prefix.to_string(), entries: Vec::new(), moved_to: None }
    }

    /// Registers a tensor that is trained, and names it.
    #[track_caller]
    pub fn parameter(&mut self, name: &str, tensor: Tensor) -> Result<()> {
        self.register("parameter", Role::Parameter, name, tensor)
    }

    /// Registers a tensor that is not trained but belongs to the model, and names it.
    #[track_caller]
    pub fn buffer(&mut self, name: &str, tensor: Tensor) -> Result<()> {
        self.register("buffer", Role::Buffer, name, tensor)
    }

    #[track_caller]
    fn register(&mut self, op: &'static str, role: Role, name: &str, tensor: Tensor) -> Result<()> {
        if name.is_empty() {
            return Err(Error::value(op, "name", "a name", "an empty one"));
        }
        let name = if self.prefix.is_empty() { name.to_string() } else { format!("{}.{name}", self.prefix) };
        if let Some(taken) = self.entries.iter().find(|entry| entry.name == name) {
            let expected = format!("one that is not taken: {} is registered as a {}", taken.tensor, taken.role);
            return Err(Error::value(op, "name", expected, format!("{name:?}")));
        }
        let tensor = tensor.named(&name);
        self.entries.push(Entry { _listed: Listed::new(&tensor), name, role, tensor });
        Ok(())
    }

    /// The tensor of this name, full or without the prefix. Where both fit, the full name counts.
    #[track_caller]
    pub fn get(&self, name: &str) -> Result<&Tensor> {
        self.position("get", name).map(|index| &self.entries[index].tensor)
    }

    /// Puts `tensor`, of the same shape and dtype, in the place of the one of this name, and names it.
    #[track_caller]
    pub fn replace(&mut self, name: &str, tensor: Tensor) -> Result<()> {
        let index = self.position("replace", name)?;
        let old = &self.entries[index].tensor;
        let expected = if old.dtype() != tensor.dtype() {
            format!("{}, the dtype of {old}", old.dtype())
        } else if old.shape() != tensor.shape() {
            format!("{}, the shape of {old}", old.shape())
        } else {
            let tensor = tensor.named(&self.entries[index].name);
            self.entries[index].set(tensor);
            return Ok(());
        };
        let operand = Box::new(tensor.as_operand("tensor"));
        let hint = "Cast or reshape it, or register it under another name.".to_string();
        Err(Error::Operand { op: "replace", operand, expected, hint, at: Location::caller() })
    }

    /// Every registered tensor, in the order of registration.
    pub fn iter(&self) -> std::slice::Iter<'_, Entry> {
        self.entries.iter()
    }

    /// How many tensors are registered.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is registered.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Moves everything to `device`. On an error nothing has changed; so for a while both copies are there. Each
    /// move is counted in the ledger at the caller's line. Tensors that share memory (tied weights, a transposed
    /// view, slices of an arena that is registered itself) move once and share memory there as they did here.
    #[track_caller]
    pub fn to(&mut self, device: Device) -> Result<()> {
        let at = Location::caller();
        device.check_usable("Registry::to", at)?;
        let mut arrived: Vec<(usize, Tensor)> = Vec::new();
        for tied in self.tied() {
            let first = &self.entries[tied.members[0]].tensor;
            if first.device() == device {
                continue;
            }
            if let Some(other) = tied.beyond_first {
                return Err(cannot_stay_tied(first, &self.entries[other].tensor, at));
            }
            let moved = first.to_at(device, "Registry::to", at)?;
            if tied.members.len() == 1 {
                arrived.push((tied.members[0], moved));
                continue;
            }
            for &index in &tied.members {
                arrived.push((index, same_part(&moved, first, &self.entries[index].tensor)?));
            }
        }
        for (index, tensor) in arrived {
            let entry = &mut self.entries[index];
            let tensor = tensor.named(&entry.name);
            entry.set(tensor);
        }
        self.moved_to = Some(device);
        Ok(())
    }

    /// Where the model is: where the last `to` brought it, else where most of its bytes are.
    pub fn home(&self) -> Option<Device> {
        if self.moved_to.is_some() {
            return self.moved_to;
        }
        let most = |best: Option<(Device, usize)>, (device, bytes)| match best {
            Some((_, best_bytes)) if bytes <= best_bytes => best,
            _ => Some((device, bytes)),
        };
        self.bytes_by_device().into_iter().fold(None, most).map(|(device, _)| device)
    }

    /// The registered tensors by the device they are on, the CPU first.
    pub fn by_device(&self) -> Vec<(Device, Vec<&Entry>)> {
        let mut by_device: BTreeMap<Device, Vec<&Entry>> = BTreeMap::new();
        for entry in &self.entries {
            by_device.entry(entry.tensor.device()).or_default().push(entry);
        }
        by_device.into_iter().collect()
    }

    /// What is not where the model is (`home`): registered tensors first, then live tensors that bear a name of this
    /// model but that no registry of this process holds.
    pub fn left_behind(&self) -> Vec<LeftBehind> {
        let Some(home) = self.home() else { return Vec::new() };
        let elsewhere = self.entries.iter().filter(|entry| entry.tensor.device() != home);
        let mut left: Vec<LeftBehind> = elsewhere
            .map(|Entry { tensor, .. }| {
                let (bytes, made_at) = (tensor.bytes(), tensor.storage().made_at);
                LeftBehind {
                    live: LiveTensor { tensor: tensor.info(), bytes, made_at },
                    registered: true,
                    way_out: WayOut::Move(home),
                }
            })
            .collect();
        for device in Device::usable().into_iter().filter(|&device| device != home) {
            let live = memory::named_live(device);
            let listed = listed();
            for (_, live) in live.into_iter().filter(|(id, _)| !listed.contains_key(id)) {
                let name = live.tensor.name.as_deref().unwrap_or_default();
                let way_out = if self.entries.iter().any(|entry| entry.name == name) {
                    WayOut::Drop
                } else if !self.prefix.is_empty() && self.without_prefix(name).is_some() {
                    WayOut::Register(self.prefix.clone())
                } else {
                    continue;
                };
                left.push(LeftBehind { live, registered: false, way_out });
            }
        }
        left
    }

    /// The name without the prefix and its dot, if it begins with them.
    fn without_prefix<'a>(&self, name: &'a str) -> Option<&'a str> {
        if self.prefix.is_empty() { Some(name) } else { name.strip_prefix(&self.prefix)?.strip_prefix('.') }
    }

    #[track_caller]
    fn position(&self, op: &'static str, name: &str) -> Result<usize> {
        let full = self.entries.iter().position(|entry| entry.name == name);
        let short = || self.entries.iter().position(|entry| self.without_prefix(&entry.name) == Some(name));
        if let Some(index) = full.or_else(short) {
            return Ok(index);
        }
        let expected = match &self.near(name)[..] {
            [] => "a registered one; none is yet".to_string(),
            near => format!("a registered one; the nearest: {}", near.join(", ")),
        };
        Err(Error::value(op, "name", expected, format!("{name:?}")))
    }

    /// The registered names that are least to be changed to get `name`.
    fn near(&self, name: &str) -> Vec<&str> {
        let distance = |entry: &&Entry| {
            let short = self.without_prefix(&entry.name).unwrap_or(&entry.name);
            edits(name, &entry.name).min(edits(name, short))
        };
        let mut by_distance: Vec<&Entry> = self.entries.iter().collect();
        by_distance.sort_by_cached_key(distance);
        by_distance.into_iter().take(NAMES_SUGGESTED_MAX).map(|entry| entry.name.as_str()).collect()
    }

    /// All entries, those that share memory together.
    fn tied(&self) -> Vec<Tied> {
        let storage_and_range = |index: usize| {
            let tensor = &self.entries[index].tensor;
            (tensor.storage().id(), tensor.byte_range())
        };
        let mut order: Vec<usize> = (0..self.entries.len()).collect();
        order.sort_by_key(|&index| {
            let (id, range) = storage_and_range(index);
            (id, range.start, std::cmp::Reverse(range.end))
        });
        let mut groups: Vec<Tied> = Vec::new();
        let mut last_id = None;
        for index in order {
            let (id, range) = storage_and_range(index);
            match groups.last_mut() {
                Some(group) if last_id == Some(id) && range.start < group.bytes.end => {
                    group.members.push(index);
                    if range.end > group.bytes.end {
                        group.bytes.end = range.end;
                        group.beyond_first = Some(index);
                    }
                }
                _ => groups.push(Tied { members: vec![index], bytes: range, beyond_first: None }),
            }
            last_id = Some(id);
        }
        // What was registered first moves first.
        groups.sort_by_key(|group| group.members.iter().min().copied());
        groups
    }

    /// Bytes on each device, memory that is shared counted once.
    fn bytes_by_device(&self) -> BTreeMap<Device, usize> {
        let mut sums = BTreeMap::new();
        for tied in self.tied() {
            *sums.entry(self.entries[tied.members[0]].tensor.device()).or_default() += tied.bytes.len();
        }
        sums
    }
}

impl<'a> IntoIterator for &'a Registry {
    type Item = &'a Entry;
    type IntoIter = std::slice::Iter<'a, Entry>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl fmt::Display for Registry {
    /// A table by device with its sums. Memory that several tensors share counts once.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.entries.is_empty() {
            return writeln!(f, "nothing registered");
        }
        let mut shares_with = BTreeMap::new();
        for Tied { mut members, .. } in self.tied() {
            members.sort_unstable();
            for &index in &members[1..] {
                shares_with.insert(self.entries[index].name(), self.entries[members[0]].name());
            }
        }
        let sums = self.bytes_by_device();
        let width = self.entries.iter().map(|entry| entry.name.chars().count()).max().unwrap_or(0).max("name".len());
        let shape = |entry: &Entry| entry.tensor.shape().to_string();
        let shape_width = self.entries.iter().map(|entry| shape(entry).len()).max().unwrap_or(0).max("shape".len());
        let (name, dims) = ("name", "shape");
        writeln!(
            f,
            "{:<11}{name:<width$}  {:<7}{dims:<shape_width$}  {:<9}{:>10}",
            "role", "dtype", "device", "bytes"
        )?;
        for (device, entries) in self.by_device() {
            for entry in &entries {
                let Entry { name, role, tensor, .. } = entry;
                let (dtype, dims, bytes) = (tensor.dtype(), shape(entry), human_bytes(tensor.bytes()));
                write!(f, "{role:<11}{name:<width$}  {dtype:<7}{dims:<shape_width$}  {device:<9}{bytes:>10}")?;
                match shares_with.get(name.as_str()) {
                    Some(other) => writeln!(f, "  shares memory with {other}")?,
                    None => writeln!(f)?,
                }
            }
            let bytes = sums.get(&device).copied().unwrap_or(0);
            let plural = if entries.len() == 1 { "" } else { "s" };
            writeln!(f, "on {device}: {} tensor{plural}, {}", entries.len(), human_bytes(bytes))?;
        }
        Ok(())
    }
}

/// A tensor of a model that is not where the model is.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LeftBehind {
    /// Which, how large, and where it was made.
    pub live: LiveTensor,
    /// Whether the registry holds it.
    pub registered: bool,
    way_out: WayOut,
}

#[derive(Clone, Debug)]
enum WayOut {
    /// Registered: move it.
    Move(Device),
    /// Bears a name of the model with this prefix, but was never registered.
    Register(String),
    /// Bears the name of a registered tensor, but is not that one: an older copy, or a copy of it.
    Drop,
}

impl fmt::Display for LeftBehind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LiveTensor { tensor, made_at, .. } = &self.live;
        write!(f, "{tensor}, made at {}, was left behind: ", Place(made_at))?;
        match &self.way_out {
            WayOut::Move(home) => write!(f, "it is registered; move it with to(Device::{home:?})"),
            WayOut::Register(prefix) => {
                write!(f, "register it as a buffer so that it moves with {prefix}")
            }
            WayOut::Drop => write!(f, "it is not the registered tensor of that name; take that one with get"),
        }
    }
}

fn cannot_stay_tied(first: &Tensor, other: &Tensor, at: Site) -> Error {
    Error::Operand {
        op: "Registry::to",
        operand: Box::new(other.as_operand("tensor")),
        expected: format!("memory of its own, or all of it within that of {first}, with which it shares a part"),
        hint: "Register the whole memory that they are slices of as well: then they stay together.".into(),
        at,
    }
}

/// The part of `moved` that `member` is of `whole`, which `moved` is a copy of.
fn same_part(moved: &Tensor, whole: &Tensor, member: &Tensor) -> Result<Tensor> {
    let first = (member.byte_range().start - whole.byte_range().start) / member.dtype().bytes();
    let row_major = if moved.is_transposed() { moved.t()? } else { moved.clone() };
    let part = row_major.flatten()?.slice(first..first + member.count())?;
    match member.shape()[..] {
        [rows, columns] if member.is_transposed() => part.reshape(&[columns, rows])?.t(),
        _ => part.reshape(member.shape()),
    }
}

/// How many letters have to be put in, taken out or changed to make `other` of `name`.
fn edits(name: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (index, letter) in name.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], index + 1);
        for (column, &wanted) in other.iter().enumerate() {
            let changed = diagonal + usize::from(letter != wanted);
            diagonal = row[column + 1];
            row[column + 1] = changed.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests;
