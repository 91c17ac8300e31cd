//! `Registry`: the named parameters and buffers of a small model. It moves them together, lists
//! them by device, and finds by name what was left behind on another device.
//!
//! The trainer keeps its parameters in flat arenas instead (`Params` of ddp-nn), made on their
//! device. The registry is for code that moves a model, and for the placement tour.

use std::collections::{BTreeMap, btree_map};
use std::fmt;
use std::panic::Location;
use std::sync::Mutex;

use crate::error::{Error, Line, LiveTensor, Result, human_bytes};
use crate::sync::lock;
use crate::{Device, Tensor, memory};

/// What a registered tensor is to its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Trained.
    Parameter,
    /// Not trained, but part of the model: masks, tables, running means.
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
    role: Role,
    tensor: Tensor,
    listed: Listed,
}

/// The storages that the registries of this process hold, once for each entry. Ranks that are
/// threads have registries with the same prefix on different devices.
static LISTED: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// A storage in `LISTED`, by its id, until this is dropped.
#[derive(Debug)]
struct Listed(u64);

impl Listed {
    fn new(tensor: &Tensor) -> Listed {
        let id = tensor.storage().id();
        lock(&LISTED).push(id);
        Listed(id)
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        let mut listed = lock(&LISTED);
        if let Some(index) = listed.iter().position(|id| *id == self.0) {
            listed.swap_remove(index);
        }
    }
}

impl Entry {
    /// The full name: the registry's prefix, a dot, the name it was registered under.
    pub fn name(&self) -> &str {
        self.tensor.name().unwrap_or_default()
    }

    /// Parameter or buffer.
    pub fn role(&self) -> Role {
        self.role
    }

    /// The tensor, which has the full name.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

/// Named parameters and buffers that move together.
#[derive(Debug)]
pub struct Registry {
    prefix: String,
    entries: Vec<Entry>,
    /// The device of the last `to`.
    moved_to: Option<Device>,
}

impl Registry {
    /// An empty registry, whose names begin with `prefix` and a dot.
    pub fn new(prefix: &str) -> Registry {
        Registry {
            prefix: prefix.to_string(),
            entries: Vec::new(),
            moved_to: None,
        }
    }

    /// Registers a tensor that is trained, and names it.
    #[track_caller]
    pub fn parameter(&mut self, name: &str, tensor: Tensor) -> Result<()> {
        self.register("parameter", Role::Parameter, name, tensor)
    }

    /// Registers a tensor that is part of the model and not trained, and names it.
    #[track_caller]
    pub fn buffer(&mut self, name: &str, tensor: Tensor) -> Result<()> {
        self.register("buffer", Role::Buffer, name, tensor)
    }

    #[track_caller]
    fn register(&mut self, op: &'static str, role: Role, name: &str, tensor: Tensor) -> Result<()> {
        let full = self.full(name);
        if name.is_empty() || self.entries.iter().any(|entry| entry.name() == full) {
            return Err(Error::value(op, "name", "a new name", format!("{name:?}")));
        }
        let tensor = tensor.named(&full);
        let listed = Listed::new(&tensor);
        self.entries.push(Entry {
            role,
            tensor,
            listed,
        });
        Ok(())
    }

    fn full(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    /// The tensor that was registered under this name.
    #[track_caller]
    pub fn get(&self, name: &str) -> Result<&Tensor> {
        let full = self.full(name);
        let found = self.entries.iter().find(|entry| entry.name() == full);
        if let Some(entry) = found {
            return Ok(&entry.tensor);
        }
        let names: Vec<&str> = self.entries.iter().map(Entry::name).collect();
        let expected = format!("one of [{}]", names.join(", "));
        Err(Error::value("get", "name", expected, full))
    }

    /// Every entry, in the order of registration.
    pub fn iter(&self) -> std::slice::Iter<'_, Entry> {
        self.entries.iter()
    }

    /// Moves everything to `device`; on an error nothing has moved. Each move is in the ledger at
    /// the caller's line. Memory moves as a whole and once, so tensors that share it (tied weights,
    /// transposed views, slices of an arena) still share it.
    #[track_caller]
    pub fn to(&mut self, device: Device) -> Result<()> {
        let (op, at) = ("Registry::to", Location::caller());
        device.check_usable(op, at)?;
        let mut copies: BTreeMap<u64, Tensor> = BTreeMap::new();
        let mut moved = Vec::with_capacity(self.entries.len());
        for Entry { tensor, .. } in &self.entries {
            if tensor.device() == device {
                moved.push(tensor.clone());
                continue;
            }
            let copy = match copies.entry(tensor.storage().id()) {
                btree_map::Entry::Occupied(copy) => copy.into_mut(),
                btree_map::Entry::Vacant(slot) => {
                    let whole = if tensor.is_whole_storage() {
                        tensor.clone()
                    } else {
                        tensor.whole_storage()?
                    };
                    slot.insert(whole.to_at(device, op, at)?)
                }
            };
            moved.push(tensor.with_storage_of(copy));
        }
        for (entry, tensor) in self.entries.iter_mut().zip(moved) {
            let name = entry.name().to_string();
            entry.listed = Listed::new(&tensor);
            entry.tensor = tensor.named(&name);
        }
        self.moved_to = Some(device);
        Ok(())
    }

    /// The device of the model: that of the last `to`, else the one with most of its bytes.
    pub fn home(&self) -> Option<Device> {
        let bytes = |entries: &[&Entry]| entries.iter().map(|it| it.tensor.bytes()).sum::<usize>();
        let by_device = self.by_device().into_iter().rev();
        let most = by_device.max_by_key(|(_, entries)| bytes(entries));
        self.moved_to.or(most.map(|(device, _)| device))
    }

    /// The entries by the device they are on, the CPU first.
    pub fn by_device(&self) -> Vec<(Device, Vec<&Entry>)> {
        let mut by_device: BTreeMap<Device, Vec<&Entry>> = BTreeMap::new();
        for entry in &self.entries {
            let device = entry.tensor.device();
            by_device.entry(device).or_default().push(entry);
        }
        by_device.into_iter().collect()
    }

    /// Live tensors with a name of this model that are not on its device (`home`): its own, and
    /// those that no registry of this process holds.
    pub fn left_behind(&self) -> Vec<LeftBehind> {
        let Some(home) = self.home() else {
            return Vec::new();
        };
        let mut left = Vec::new();
        for Entry { tensor, .. } in &self.entries {
            if tensor.device() != home {
                let live = LiveTensor {
                    tensor: tensor.info(),
                    bytes: tensor.bytes(),
                    made_at: tensor.storage().made_at,
                };
                let help = format!("move it with to(Device::{home:?})");
                left.push(LeftBehind { live, help });
            }
        }
        let elsewhere = Device::usable().into_iter().filter(|&it| it != home);
        for (id, live) in elsewhere.flat_map(memory::named_live) {
            let name = live.tensor.name.as_deref().unwrap_or_default();
            let rest = name.strip_prefix(&self.prefix);
            let is_ours = rest.is_some_and(|rest| rest.starts_with('.'));
            if !is_ours || lock(&LISTED).contains(&id) {
                continue;
            }
            let help = if self.entries.iter().any(|entry| entry.name() == name) {
                "use the registered tensor of that name, from get()".to_string()
            } else {
                format!(
                    "register it as a buffer, so that it moves with {}",
                    self.prefix
                )
            };
            left.push(LeftBehind { live, help });
        }
        left
    }
}

impl fmt::Display for Registry {
    /// A table by device with its sums.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shape = |entry: &Entry| entry.tensor.shape().to_string();
        let widest = |lengths: &mut dyn Iterator<Item = usize>| lengths.max().unwrap_or(0);
        let (name, dims) = ("name", "shape");
        let width = widest(&mut self.iter().map(|it| it.name().len())).max(name.len());
        let shape_width = widest(&mut self.iter().map(|it| shape(it).len())).max(dims.len());
        writeln!(
            f,
            "{:<11}{name:<width$}  {:<7}{dims:<shape_width$}  {:<9}{:>10}",
            "role", "dtype", "device", "bytes"
        )?;
        for (device, entries) in self.by_device() {
            for entry in &entries {
                let (role, name, dims) = (entry.role, entry.name(), shape(entry));
                let (dtype, bytes) = (entry.tensor.dtype(), human_bytes(entry.tensor.bytes()));
                writeln!(
                    f,
                    "{role:<11}{name:<width$}  {dtype:<7}{dims:<shape_width$}  {device:<9}{bytes:>10}"
                )?;
            }
            let storages = entries.iter().map(|it| it.tensor.storage());
            let bytes_by_id: BTreeMap<u64, usize> =
                storages.map(|it| (it.id(), it.bytes())).collect();
            let (count, bytes) = (entries.len(), human_bytes(bytes_by_id.values().sum()));
            let plural = if count == 1 { "" } else { "s" };
            writeln!(f, "on {device}: {count} tensor{plural}, {bytes}")?;
        }
        Ok(())
    }
}

/// A tensor of a model that is not on the model's device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LeftBehind {
    /// Which, how large, and where it was made.
    pub live: LiveTensor,
    help: String,
}

impl fmt::Display for LeftBehind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LiveTensor {
            tensor, made_at, ..
        } = &self.live;
        let (line, help) = (Line(made_at), &self.help);
        write!(f, "{tensor}, made at {line}, was left behind; help: {help}")
    }
}

#[cfg(test)]
mod tests;
