//! The handler of faults: finds accesses to pinned memory that came too early.
//!
//! It runs on the stack of the thread that faulted, not on the small alternate one: it takes the
//! lock, asks who is in flight and may print a finding with its stacks. That is allowed here
//! because the signal is no interruption at an arbitrary place: it comes from an instruction of the
//! product that touches its own buffer. The price is that a stack overflow of the product ends the
//! process by SIGSEGV without the message of Rust's runtime.

use std::sync::{Once, OnceLock};

use super::super::allocation::Owner;
use super::mapping::{Protection, open_page};
use crate::machine::{self, LockedMachine};
use crate::report::{self, FindingKind};
use crate::scheduler;
use crate::work::{Address, Touched};

static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the handler, once a process. Faults that are none of ours go to the one that was there
/// before.
pub fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: sigaction is plain data for which zeros are valid; both pointers are to such data
        // of ours; the handler has the signature that SA_SIGINFO asks for. SA_NODEFER: a fault
        // within the handler is to end the process, not to hang it.
        unsafe {
            let mut previous: libc::sigaction = std::mem::zeroed();
            libc::sigaction(libc::SIGSEGV, std::ptr::null(), &mut previous);
            PREVIOUS.set(previous).ok();
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
            libc::sigaction(libc::SIGSEGV, &action, std::ptr::null_mut());
        }
    });
}

extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives a valid siginfo to a handler with SA_SIGINFO, and for SIGSEGV it has
    // an address.
    let address = unsafe { (*info).si_addr() } as Address;
    if !touched(address, is_write(context)) {
        forward(signal, info, context);
    }
}

/// Whether the touch was a write; where the processor is not known to say so, it counts as one.
fn is_write(context: *mut libc::c_void) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        const WRITE: i64 = 2;
        // SAFETY: the kernel gives a valid ucontext to a handler with SA_SIGINFO.
        let context = unsafe { &*context.cast::<libc::ucontext_t>() };
        context.uc_mcontext.gregs[libc::REG_ERR as usize] & WRITE != 0
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = context;
        true
    }
}

/// Decides about a touch; false if the address is none of ours.
fn touched(address: Address, is_write: bool) -> bool {
    if machine::is_held_by_this_thread() {
        // A kernel uses pinned memory directly. Its accesses are the race detector's to judge, and
        // the machine cannot be asked: this very thread holds it.
        return open_page(address);
    }
    let mut held = LockedMachine::take();
    decide(&mut held, address, is_write)
}

fn decide(machine: &mut LockedMachine, address: Address, is_write: bool) -> bool {
    let before = machine
        .memory
        .allocations
        .range(..=address)
        .next_back()
        .map(|(_, allocation)| allocation.clone());
    let Some(allocation) = before.filter(|before| matches!(before.owner, Owner::Host(_))) else {
        return false;
    };
    let Owner::Host(mapping) = &allocation.owner else {
        return false;
    };
    let how = if is_write { "writes to" } else { "reads" };
    let offset = address - allocation.range.start;
    if let Some(end) = allocation.end() {
        if !allocation.range.contains(&address) {
            return false;
        }
        let message = format!("the host {how} byte {offset} of {allocation}, {end}");
        report::finding(machine, FindingKind::UseAfterFree, message);
        return false;
    }
    if !mapping.covers(address) {
        if address < allocation.range.end + 4096 {
            let message = format!("the host {how} byte {offset} of {allocation}");
            report::finding(machine, FindingKind::OutOfBounds, message);
        }
        return false;
    }
    // A host function runs in the order of its stream: the race detector knows which copies are
    // before or after it, and which are neither.
    if let Some((actor, operation)) = scheduler::host_function() {
        let mut touched = Touched::default();
        let ranges = if is_write {
            &mut touched.writes
        } else {
            &mut touched.reads
        };
        ranges.push(address..address + 1);
        if let Some(race) = machine.race.access(actor, operation, &touched) {
            report::race(machine, &race);
        }
    } else if let Some(flight) = machine.memory.in_flight.collides(address, is_write) {
        let message = format!(
            "the host {how} byte {offset} of {allocation}\n  while it is in flight: {flight}"
        );
        report::finding(machine, FindingKind::HostAccess, message);
    }
    mapping.protect(&(address..address + 1), Protection::Open);
    true
}

/// Gives the fault to whoever handled it before.
fn forward(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let previous = PREVIOUS
        .get()
        .filter(|previous| ![libc::SIG_DFL, libc::SIG_IGN].contains(&previous.sa_sigaction));
    match previous {
        Some(previous) if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            type Handler = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);
            // SAFETY: whoever installed it with SA_SIGINFO said that it has this signature.
            let handler = unsafe { std::mem::transmute::<usize, Handler>(previous.sa_sigaction) };
            handler(signal, info, context);
        }
        Some(previous) => {
            // SAFETY: whoever installed it without SA_SIGINFO said that it has this signature.
            let handler =
                unsafe { std::mem::transmute::<usize, extern "C" fn(i32)>(previous.sa_sigaction) };
            handler(signal);
        }
        None => {
            // SAFETY: plain data of ours; the default action ends the process when the instruction
            // is tried again.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &action, std::ptr::null_mut());
            }
        }
    }
}
