//! The machine as a whole: its state, the one lock around it, and what the host knows.

pub mod current;
pub mod end;
pub mod entry;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
pub mod threads;

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::error::CUresult;

pub use self::current::current_device;
pub use self::entry::{Out, call, call_library, call_waiting, put};
use crate::config::Config;
use crate::{device, event, faults, graph, memory, nccl, race, report, stream, timeline};

/// Whether the process is ending: the product's memory may be gone.
pub static IS_ENDING: AtomicBool = AtomicBool::new(false);

/// The whole state. Tests create their own; the entry points share one.
pub struct Machine {
    /// What the environment asked for.
    pub config: Config,
    /// Whether cuInit was called.
    pub initialised: bool,
    /// The GPUs, by ordinal.
    pub devices: Vec<device::Device>,
    /// All memory that the product allocated, and what was freed.
    pub memory: memory::AddressSpace,
    /// Streams and what waits in them.
    pub streams: stream::Streams,
    /// Events.
    pub events: event::Events,
    /// Graphs, their executable forms and captures.
    pub graphs: graph::Graphs,
    /// Communicators.
    pub nccl: nccl::Nccl,
    /// Which operation touched which bytes when.
    pub race: race::Detector,
    /// The fault plan.
    pub faults: faults::Plan,
    /// The simulated clock.
    pub timeline: timeline::Timeline,
    /// All findings.
    pub report: report::Report,
    /// The host's actor in the clocks: see [`host_actor`].
    host: Option<race::Actor>,
}

impl Machine {
    /// A machine as `config` describes it.
    pub fn new(config: Config) -> Self {
        let devices = (0..config.devices)
            .map(|ordinal| device::Device::new(ordinal, &config))
            .collect();
        Self {
            initialised: false,
            devices,
            memory: memory::AddressSpace::new(config.devices, config.memory_bytes, config.own),
            streams: stream::Streams::default(),
            events: event::Events::default(),
            graphs: graph::Graphs::default(),
            nccl: nccl::Nccl::default(),
            race: race::Detector::default(),
            faults: config.faults.clone(),
            timeline: timeline::Timeline::new(config.devices, config.timeline.as_deref()),
            report: report::Report::new(config.on_finding),
            host: None,
            config,
        }
    }
}

thread_local! {
    /// Whether this thread holds the lock: a fault in the simulator itself must not wait for it.
    static HOLDS: Cell<bool> = const { Cell::new(false) };
}

/// The machine, locked by this thread. Waiting calls give the lock up between pieces of work with
/// [`LockedMachine::pause`].
pub struct LockedMachine {
    // None only inside `pause`.
    guard: Option<MutexGuard<'static, Machine>>,
}

impl LockedMachine {
    /// Takes the lock of the machine that the entry points share, creating the machine on first
    /// use.
    pub fn take() -> Self {
        Self {
            guard: Some(lock()),
        }
    }

    /// As [`LockedMachine::take`], but gives up after this time.
    pub fn take_within(patience: Duration) -> Option<Self> {
        let end = Instant::now() + patience;
        loop {
            match shared().try_lock() {
                Ok(guard) => return Some(Self::of(guard)),
                Err(TryLockError::Poisoned(poisoned)) => {
                    return Some(Self::of(poisoned.into_inner()));
                }
                Err(TryLockError::WouldBlock) if Instant::now() >= end => return None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    fn of(guard: MutexGuard<'static, Machine>) -> Self {
        HOLDS.set(true);
        Self { guard: Some(guard) }
    }

    /// Releases the lock briefly so that other threads' calls can proceed.
    pub fn pause(&mut self) {
        self.without(std::thread::yield_now);
    }

    /// Runs `body` without the lock: code that may block or call back into the product.
    pub fn without<R>(&mut self, body: impl FnOnce() -> R) -> R {
        self.guard = None;
        HOLDS.set(false);
        let result = body();
        self.guard = Some(lock());
        result
    }
}

impl Drop for LockedMachine {
    fn drop(&mut self) {
        self.guard = None;
        HOLDS.set(false);
    }
}

impl Deref for LockedMachine {
    type Target = Machine;

    fn deref(&self) -> &Machine {
        self.guard
            .as_ref()
            .expect("the lock is held outside `without`")
    }
}

impl DerefMut for LockedMachine {
    fn deref_mut(&mut self) -> &mut Machine {
        self.guard
            .as_mut()
            .expect("the lock is held outside `without`")
    }
}

fn shared() -> &'static Mutex<Machine> {
    static MACHINE: OnceLock<Mutex<Machine>> = OnceLock::new();
    MACHINE.get_or_init(|| Mutex::new(Machine::new(Config::from_environment())))
}

fn lock() -> MutexGuard<'static, Machine> {
    // A panic in an entry point ends the process at the C boundary, so a poisoned lock is only
    // visible during that.
    let guard = shared().lock().unwrap_or_else(PoisonError::into_inner);
    HOLDS.set(true);
    guard
}

/// Whether the calling thread is inside the simulator with the lock held.
pub fn is_held_by_this_thread() -> bool {
    HOLDS.get()
}

/// The actor of the calling host thread. All host threads are one actor: their own synchronization
/// (locks, channels) is invisible here and must not be reported as missing. So what one thread
/// waited for counts as known to all, in the order of their calls: see [`threads`].
pub fn host_actor(machine: &mut Machine) -> race::Actor {
    match machine.host {
        Some(host) => host,
        None => *machine.host.insert(machine.race.actor()),
    }
}

/// The host has waited for `clock`: it is ordered after it and may touch pinned memory of completed
/// copies again. Every host wait ends here, never by [`race::Detector::join`] alone.
pub fn host_joins(machine: &mut Machine, clock: &race::Clock) {
    let host = host_actor(machine);
    machine.race.join(host, clock);
    let Machine { race, memory, .. } = machine;
    let knows = |clock: &race::Clock| race.knows(host, clock);
    memory.in_flight.open_what_is_known(knows);
    let knows = |actor, moment| race.knows_moment(host, actor, moment);
    memory.pools.see_what_is_known(knows);
}

/// Marks a device as lost: every later call on it returns `code`. `message` says why, once.
pub fn lose_device(machine: &mut Machine, device: usize, code: CUresult, message: &str) {
    machine.memory.in_flight.drop_device(device);
    if machine.devices[device].lost.replace(code).is_none() {
        eprintln!("simcuda: device {device} is lost ({code:?}): {message}");
    }
}
