//! Loops of machine code in memory. `machine_code.rs` makes them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::{NonNull, null_mut};
use std::sync::Mutex;

use crate::panics::lock;

/// Elements of a register.
pub(super) const WIDTH: usize = 8;
/// The most operands of a loop.
pub(super) const OPERANDS_MAX: usize = 12;

/// Where a loop finds elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoopOperand {
    /// An input, by its number.
    Load(usize),
    /// An output, by its number.
    Store(usize),
    Slot(usize),
}

/// Some steps of a chain as a loop.
#[derive(Debug)]
pub(super) struct Loop {
    pub(super) steps: Range<usize>,
    pub(super) operands: Vec<LoopOperand>,
    /// Where it begins in the code.
    pub(super) start: usize,
}

/// The loops of a chain.
#[derive(Debug)]
pub(super) struct Loops {
    loops: Vec<Loop>,
    code: Option<Code>,
}

impl Loops {
    /// None of them will be found if this process may not have executable memory.
    pub(super) fn new(loops: Vec<Loop>, code: Vec<u8>) -> Loops {
        let code = (!loops.is_empty()).then(|| Code::of(code)).flatten();
        Loops { loops, code }
    }

    /// The loop that begins with a step.
    pub(super) fn at(&self, step: usize) -> Option<&Loop> {
        self.code.as_ref()?;
        self.loops.iter().find(|it| it.steps.start == step)
    }

    /// Runs a loop over `count` elements.
    ///
    /// # Safety
    /// The processor is an x86-64 with AVX2. `of` is one of these loops. `operands` has the
    /// elements of each of its operands, `count` of them, a multiple of `WIDTH` above 0; those of
    /// outputs and slots may be written. `numbers` points to `StepNumbers`.
    pub(super) unsafe fn run(
        &self,
        of: &Loop,
        operands: &[*mut f32; OPERANDS_MAX],
        numbers: *const f32,
        count: usize,
    ) {
        type LoopFunction = unsafe extern "C" fn(*const *mut f32, usize, *const f32, usize);
        let Some(code) = &self.code else { return };
        // SAFETY: the assembler wrote a function of this type there, which keeps to that convention
        // of x86-64. It reads and writes what the caller promises.
        unsafe {
            let entry = code.0.as_ptr().byte_add(of.start);
            let entry = std::mem::transmute::<*mut libc::c_void, LoopFunction>(entry);
            entry(operands.as_ptr(), 0, numbers, 4 * count);
        }
    }
}

/// The start of memory that holds machine code, for as long as the process lives: chains of one
/// formula have the same code whatever their sizes, so there is little of it.
#[derive(Clone, Copy, Debug)]
struct Code(NonNull<libc::c_void>);

// SAFETY: nothing writes to the memory after `made`.
unsafe impl Send for Code {}
// SAFETY: as above.
unsafe impl Sync for Code {}

static CODES: Mutex<BTreeMap<Vec<u8>, Option<Code>>> = Mutex::new(BTreeMap::new());

impl Code {
    /// None if this process may not have executable memory.
    fn of(code: Vec<u8>) -> Option<Code> {
        let mut codes = lock(&CODES);
        *codes
            .entry(code)
            .or_insert_with_key(|code| Code::made(code))
    }

    fn made(code: &[u8]) -> Option<Code> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new memory, at no address in particular.
        let start = unsafe { libc::mmap(null_mut(), code.len(), access, kind, -1, 0) };
        let memory = NonNull::new(start).filter(|_| start != libc::MAP_FAILED)?;
        // SAFETY: the memory is that long, and nothing else knows of it.
        unsafe {
            start.cast::<u8>().copy_from(code.as_ptr(), code.len());
            if libc::mprotect(start, code.len(), libc::PROT_READ | libc::PROT_EXEC) == 0 {
                return Some(Code(memory));
            }
            libc::munmap(start, code.len());
        }
        None
    }
}
